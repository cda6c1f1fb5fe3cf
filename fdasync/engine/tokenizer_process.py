"""Tokenises long texts in a child process, so that the engine's loop never waits for them.

`TokenizerProcess` starts its child at the first use and again after a death; `main` is the child. Knows no requests.
Called by `prepare.py`.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

from fdasync.errors import DeadlineExceeded, EngineClosed, TokenizerFailed, WorkerStuck
from fdasync.ipc.deadlines import Within
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import remote
from fdasync.ipc.rpc import RpcClient
from fdasync.ipc.service import Service, serve
from fdasync.registry.registry import TOKENIZERS, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.errors import FdasyncError


def token_ids(tokenizer: Tokenizer, text: str) -> array[int]:
    """Token ids of a text as int32. Raises TokenizerFailed, naming the tokenizer's class, for every error."""
    try:
        encoded = tokenizer.encode(text)
    except Exception as error:
        raise TokenizerFailed(type(tokenizer).__name__, f"encode raised {type(error).__name__}: {error}") from error
    try:
        return array("i", encoded)
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"encode gave no token ids but {type(encoded).__name__}: {error}"
        raise TokenizerFailed(type(tokenizer).__name__, problem) from None


class TokenizerProcess:
    """One child for one tokenizer.

    Args:
        name: entry-point name in `fdasync.tokenizers`.
        model: folder given to its factory.
    """

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        self._child: RpcClient | None = None
        self._closed = False

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        """Token ids of a text. Cancelling stops the waiting; the child finishes and its answer is dropped.

        Raises DeadlineExceeded (the child is killed then: it works text by text), WorkerDied, WorkerStuck
        if another text was stuck, EngineClosed, or TokenizerFailed.
        """
        if self._closed:
            raise EngineClosed("closed")
        child = self._child
        if child is None or child.ending is not None:
            child = RpcClient(asyncio.get_running_loop(), "tokenizer", __name__, TokenizerService.errors)
            self._child = child
            # the answer to each text repeats a failure to load
            child.tell(TokenizerService.load, self._name, self._model)
        answer = child.call(TokenizerService.encode, text)
        try:
            async with Within(deadline_s):
                tokens = await asyncio.shield(answer)
        except TimeoutError:
            # a stuck text would hold up every later one
            await child.kill(WorkerStuck("tokenizer", child.process.pid, "a text", deadline_s))
            raise DeadlineExceeded("tokenising", deadline_s) from None
        return array("i", tokens).tolist()

    async def aclose(self) -> None:
        """Kill the child (it holds nothing) and fail every waiting call; idempotent."""
        self._closed = True
        if self._child is not None:
            await self._child.kill(EngineClosed("closed"))


class TokenizerService(Service):
    """One tokenizer in the child. It tokenises one text after the other, and blocks the child's loop meanwhile."""

    errors = ErrorTable(TokenizerFailed)

    def __init__(self) -> None:
        self._name = ""
        self._problem = ""
        self._tokenizer: Tokenizer | None = None

    @remote()
    def load(self, name: str, model: str) -> None:
        """Use this tokenizer for the texts that follow: its entry-point name, and the model folder for its factory."""
        self._name = name
        try:
            self._tokenizer = Registry().load_function(TOKENIZERS, name)(model)
        except Exception as error:
            self._problem = f"it cannot be loaded for {model}: {type(error).__name__}: {error}"

    @remote(fits=lambda tokens, _: len(tokens) % 4 == 0)
    async def encode(self, text: str) -> bytes:
        """The token ids of a text, int32 little-endian. Raises TokenizerFailed."""
        if self._tokenizer is None:
            raise TokenizerFailed(self._name, self._problem)
        return token_ids(self._tokenizer, text).tobytes()

    def error_of(self, message: Any, error: BaseException) -> FdasyncError:
        """See `Service`. The error names the tokenizer as the engine does, and not its class."""
        return (
            self.otherwise(message, error.problem)
            if isinstance(error, TokenizerFailed)
            else super().error_of(message, error)
        )

    def otherwise(self, message: Any, problem: str) -> TokenizerFailed:  # noqa: ARG002 - the contract's
        return TokenizerFailed(self._name, problem)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Has nothing to free."""


def main() -> None:
    """The child."""
    serve(TokenizerService())
