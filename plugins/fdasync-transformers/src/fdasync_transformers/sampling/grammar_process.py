"""Checks grammars of callers in a child process, so that the worse ones cost no engine's loop more than a moment.

No limit of the library bounds how long it compiles: a schema of thirty bytes (a `multipleOf` of a million) takes it
minutes. So a child compiles each grammar first, plays some tokens, and says what both cost; a child that takes too long
is killed. What passes here compiles as fast in the worker. Knows no model and no steps. `GrammarProcess` is the
parent's side, called by `runner.py`; `main` is the child.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import BadInput, CheckpointError, EngineClosed, WorkerStuck
from fdasync.ipc.deadlines import Within
from fdasync.ipc.rpc import ErrorTable, RpcClient
from fdasync.ipc.service import Service, serve
from fdasync.request import Grammar
from fdasync_transformers.sampling.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Sequence

_ERRORS = ErrorTable(BadInput, CheckpointError)
_NOTHING = msgspec.msgpack.Decoder(None)
# of CPU: to compile with the first mask, and of a mask or a token behind it
_COMPILE_S = 0.25
_MASK_S = 0.02
_PLAYED_TOKENS = 48
# a child on a busy machine gets more time than it may use of a CPU
_PATIENCE = 8
_LOAD_S = 60.0


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Use this tokenizer.json, of a model with this vocabulary and these EOS ids."""

    tokenizer: str
    vocab_size: int
    eos_ids: tuple[int, ...]


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Check this grammar."""

    grammar: Grammar


class GrammarProcess:
    """One child for one tokenizer; it starts with the first check, and again after a grammar that it was killed for.

    Args:
        tokenizer, vocab_size, eos_ids: as `Grammars` takes them.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._load = Load(str(tokenizer), vocab_size, tuple(eos_ids))
        self._child: RpcClient | None = None
        # one after the other: a slow one must not use up the time of the others
        self._turn = asyncio.Lock()
        self._closed = self._is_loaded = False

    async def check(self, grammar: Grammar) -> None:
        """Returns for a grammar that can be kept at a bounded cost. Cancelling stops the waiting; the next check
        kills a child that is still busy.

        Raises BadInput, which says what is wrong or too slow; CheckpointError; WorkerDied and WorkerStuck where the
        child ends, EngineClosed.
        """
        async with self._turn:
            child = await self._loaded()
            limit_s = _PATIENCE * (_COMPILE_S + _MASK_S)
            try:
                async with Within(limit_s):
                    await asyncio.shield(child.send(Check(grammar), _NOTHING))
            except TimeoutError:
                await child.kill(WorkerStuck("grammar", child.process.pid, "a grammar", limit_s))
                raise _too_slow("to compile", _COMPILE_S) from None

    async def _loaded(self) -> RpcClient:
        if self._closed:
            raise EngineClosed("closed")
        child = self._child
        if child is not None and child.ending is None and (child.unanswered or not self._is_loaded):
            # a check was cancelled, or loading failed: what waits behind it is not to blame
            await child.kill(WorkerStuck("grammar", child.process.pid, "a check that was left", 0.0))
        if child is None or child.ending is not None:
            self._is_loaded = False
            child = self._child = RpcClient(asyncio.get_running_loop(), "grammar", __name__, _ERRORS)
            try:
                async with Within(_LOAD_S):
                    await asyncio.shield(child.send(self._load, _NOTHING))
            except TimeoutError:
                stuck = WorkerStuck("grammar", child.process.pid, "loading a tokenizer", _LOAD_S)
                await child.kill(stuck)
                raise stuck from None
            self._is_loaded = True
        return child

    async def aclose(self) -> None:
        """Kill the child (it holds nothing), and fail the checks under way; idempotent."""
        self._closed = True
        if self._child is not None:
            await self._child.kill(EngineClosed("closed"))


def _too_slow(what: str, limit_s: float) -> BadInput:
    return BadInput(
        "grammar", f"takes too long {what}", limit=f"{limit_s} s of a CPU", hint="make it simpler or shorter"
    )


class _GrammarService(Service):
    """The grammars of one tokenizer in the child. It blocks the child's loop while it compiles."""

    messages = Load | Check
    errors = _ERRORS

    def __init__(self) -> None:
        self._grammars: Grammars | None = None

    async def perform(self, message: Load | Check, fds: list[int]) -> None:  # noqa: ARG002 - the contract's
        if isinstance(message, Load):
            self._grammars = Grammars(Path(message.tokenizer), message.vocab_size, message.eos_ids)
            return
        assert self._grammars is not None
        began = time.process_time()
        self._grammars.check(message.grammar)
        if time.process_time() - began > _COMPILE_S:
            raise _too_slow("to compile", _COMPILE_S)
        self._play(self._grammars, message.grammar)

    @staticmethod
    def _play(grammars: Grammars, grammar: Grammar) -> None:
        """Draw a text from what the masks allow, and look how long each takes. Raises BadInput."""
        random = Random(0)
        matcher = grammars.matcher(0, grammar.packed(), array("i"))
        mask = np.zeros(grammars.words, np.int32)
        for _ in range(_PLAYED_TOKENS):
            began = time.process_time()
            matcher.fill(mask)
            spent = time.process_time() - began
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            began = time.process_time()
            matcher.accept(int(random.choice(allowed)))
            if spent + time.process_time() - began > _MASK_S:
                raise _too_slow("for a token", _MASK_S)
            if matcher.problem:
                raise BadInput("grammar", f"cannot be kept: {matcher.problem}")
            if matcher.is_ended:
                return

    def error_of(self, message: Load | Check, error: BaseException) -> BadInput | CheckpointError:
        if isinstance(error, BadInput | CheckpointError):
            return error
        if isinstance(message, Load):
            return CheckpointError(message.tokenizer, f"{type(error).__name__}: {error}")
        return BadInput("grammar", f"cannot be checked: {type(error).__name__}: {error}")

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Has nothing to free."""


def main() -> None:
    """The child."""
    serve(_GrammarService())
