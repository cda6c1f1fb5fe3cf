"""Tokenises long texts in a child process, so that the engine's loop never waits for them.

`TokenizerProcess` starts its child at the first use and again after a death; `main` is the child. Knows no requests.
Called by `prepare.py`.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import DeadlineExceeded, EngineClosed, TokenizerFailed, WorkerStuck
from fdasync.ipc.deadlines import Within
from fdasync.ipc.rpc import ErrorTable, RpcClient
from fdasync.ipc.service import Service, serve
from fdasync.registry.registry import TOKENIZERS, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import Tokenizer

_ERRORS = ErrorTable(TokenizerFailed)
_NOTHING = msgspec.msgpack.Decoder(None)
_BYTES = msgspec.msgpack.Decoder(bytes)


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Use this tokenizer for the texts that follow: its entry-point name, and the model folder for its factory."""

    name: str
    model: str


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="encode"):
    """Tokenise this text; the answer is its token ids, int32 little-endian."""

    text: str


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
            child = self._child = RpcClient(asyncio.get_running_loop(), "tokenizer", __name__, _ERRORS)
            # the answer to each text repeats a failure to load
            child.send(Load(self._name, self._model), _NOTHING)
        answer = child.send(Encode(text), _BYTES, fits=lambda tokens: len(tokens) % 4 == 0)
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


class _TokenizerService(Service):
    """One tokenizer in the child. It tokenises one text after the other, and blocks the child's loop meanwhile."""

    messages = Load | Encode
    errors = _ERRORS

    def __init__(self) -> None:
        self._name = ""
        self._problem = ""
        self._tokenizer: Tokenizer | None = None

    async def perform(self, message: Load | Encode, fds: list[int]) -> bytes | None:  # noqa: ARG002 - the contract's
        if isinstance(message, Encode):
            if self._tokenizer is None:
                raise TokenizerFailed(self._name, self._problem)
            return token_ids(self._tokenizer, message.text).tobytes()
        self._name = message.name
        try:
            self._tokenizer = Registry().load_function(TOKENIZERS, message.name)(message.model)
        except Exception as error:
            self._problem = f"it cannot be loaded for {message.model}: {type(error).__name__}: {error}"
        return None

    def error_of(self, message: Load | Encode, error: BaseException) -> TokenizerFailed:  # noqa: ARG002 - the contract's
        problem = error.problem if isinstance(error, TokenizerFailed) else f"{type(error).__name__}: {error}"
        return TokenizerFailed(self._name, problem)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Has nothing to free."""


def main() -> None:
    """The child."""
    serve(_TokenizerService())
