"""Checks grammars of callers in a child process, so that the worse ones cost no engine's loop more than a moment.

No limit of the library bounds how long it compiles: a schema of thirty bytes (a `multipleOf` of a million) takes it
minutes. So a child compiles each grammar first, plays some tokens, and says what both cost. The kernel ends a child
whose check takes too much CPU, memory or stack, and the grammar is refused. What passes here compiles as fast in the
worker. Knows no model and no steps. `GrammarProcess` is the parent's side, called by `runner.py`; `main` is the child.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from array import array
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import BadInput, CheckpointError, EngineClosed, WorkerDied, WorkerStuck
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.ipc.rpc import ErrorTable, RpcClient
from fdasync.ipc.service import Service, serve
from fdasync.request import Grammar
from fdasync_transformers.sampling.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Sequence

_ERRORS = ErrorTable(BadInput, CheckpointError)
_NOTHING = msgspec.msgpack.Decoder(None)
# of CPU: to compile with the first mask, then for a mask and its token, and for all that are played. What passes
# blocks the worker's loop once for as long as it compiles
_COMPILE_S = 0.05
_MASK_S = 0.02
_PLAY_S = 0.15
_PLAYED_TOKENS = 48
# of CPU: the kernel ends a check that takes more, wherever in the library it is
_CHECK_S = 0.5
# a child on a busy machine, where it comes last, gets more time than it may use of a CPU
_PATIENCE_S = 10.0
_LOAD_S = 60.0
#: what a child may allocate for the grammars that it checks, beside its tokenizer
MEMORY_NBYTES = 512 << 20
# the worker's stack is deeper when it compiles than the child's, and larger by so much
_STACK_NBYTES = 4 << 20
_NICE = 10


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Use this tokenizer.json, of a model with this vocabulary and these EOS ids; then allocate at most so many bytes
    more."""

    tokenizer: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_nbytes: int


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Check this grammar."""

    grammar: Grammar


class GrammarProcess:
    """One child for one tokenizer; it starts with the first check, and again after a grammar that ended it.

    Args:
        tokenizer, vocab_size, eos_ids: as `Grammars` takes them.
        memory_nbytes: what the child may allocate beside its tokenizer.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int], *, memory_nbytes: int = MEMORY_NBYTES
    ) -> None:
        self._load = Load(str(tokenizer), vocab_size, tuple(eos_ids), memory_nbytes)
        self._child: RpcClient | None = None
        # the latest check; it goes on where its caller left
        self._latest: asyncio.Future[None] | None = None
        # one after the other: a slow one must not use up the time of the others
        self._turn = asyncio.Lock()
        self._closed = self._is_loaded = False

    async def check(self, grammar: Grammar) -> None:
        """Returns for a grammar that can be kept at a bounded cost. Cancelling stops the waiting; the next check waits
        for one that was left, and kills a child that is still busy at the end of its time.

        Raises BadInput, which says what is wrong or too slow; CheckpointError; WorkerDied and WorkerStuck where the
        child cannot load the tokenizer, EngineClosed.
        """
        async with self._turn:
            try:
                await self._check(grammar)
            except WorkerDied as died:
                if died.exit_status != -signal.SIGKILL:
                    raise _ended_by(died) from None
                # by an operator, or by a machine without memory: not by this grammar, unless it happens again
                try:
                    await self._check(grammar)
                except WorkerDied as again:
                    raise _ended_by(again) from None

    async def _check(self, grammar: Grammar) -> None:
        """Raises WorkerDied where the child ends meanwhile."""
        child = await self._loaded()
        self._latest = child.send(Check(grammar), _NOTHING)
        try:
            async with Within(_PATIENCE_S):
                await asyncio.shield(self._latest)
        except TimeoutError:
            await child.kill(WorkerStuck("grammar", child.process.pid, "a grammar", _PATIENCE_S))
            raise _too_slow("to check", _CHECK_S) from None

    async def _loaded(self) -> RpcClient:
        if self._closed:
            raise EngineClosed("closed")
        child = self._child
        if child is not None and child.ending is None and (child.unanswered or not self._is_loaded):
            # a check was left, or loading failed: what waits behind it is not to blame
            if self._is_loaded and self._latest is not None:
                await wait_within([self._latest], _PATIENCE_S)
            if child.unanswered or not self._is_loaded:
                await child.kill(WorkerStuck("grammar", child.process.pid, "a check that was left", _PATIENCE_S))
        if self._closed:
            raise EngineClosed("closed")
        if child is None or child.ending is not None:
            self._is_loaded = False
            child = self._child = RpcClient(asyncio.get_running_loop(), "grammar", __name__, _ERRORS)
            await self._start(child)
            self._is_loaded = True
        return child

    async def _start(self, child: RpcClient) -> None:
        try:
            async with Within(_LOAD_S):
                await asyncio.shield(child.send(self._load, _NOTHING))
        except TimeoutError:
            stuck = WorkerStuck("grammar", child.process.pid, "loading a tokenizer", _LOAD_S)
            await child.kill(stuck)
            raise stuck from None

    async def aclose(self) -> None:
        """Kill the child (it holds nothing), and fail the checks under way; idempotent."""
        self._closed = True
        if self._child is not None:
            await self._child.kill(EngineClosed("closed"))


def _too_slow(what: str, limit_s: float) -> BadInput:
    return BadInput(
        "grammar", f"takes too long {what}", limit=f"{limit_s} s of a CPU", hint="make it simpler or shorter"
    )


def _ended_by(died: WorkerDied) -> BadInput:
    """The refusal of a grammar whose check ended the child."""
    if died.exit_status == -signal.SIGPROF:
        return _too_slow("to check", _CHECK_S)
    return BadInput("grammar", f"cannot be checked: {died}", hint="make it smaller, or nest it less deeply")


class _GrammarService(Service):
    """The grammars of one tokenizer in the child. It blocks the child's loop while it compiles."""

    messages = Load | Check
    errors = _ERRORS

    def __init__(self) -> None:
        self._grammars: Grammars | None = None

    async def perform(self, message: Load | Check, fds: list[int]) -> None:  # noqa: ARG002 - the contract's
        if isinstance(message, Load):
            self._grammars = Grammars(Path(message.tokenizer), message.vocab_size, message.eos_ids)
            _bound(message.memory_nbytes)
            return
        assert self._grammars is not None
        signal.setitimer(signal.ITIMER_PROF, _CHECK_S)
        try:
            began = time.process_time()
            self._grammars.check(message.grammar)
            if time.process_time() - began > _COMPILE_S:
                raise _too_slow("to compile", _COMPILE_S)
            self._play(self._grammars, message.grammar)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    @staticmethod
    def _play(grammars: Grammars, grammar: Grammar) -> None:
        """Draw a text from what the masks allow, and look how long each takes. Raises BadInput."""
        random = Random(0)
        matcher = grammars.matcher(0, grammar.packed(), array("i"))
        mask = np.zeros(grammars.words, np.int32)
        whole_s = 0.0
        for _ in range(_PLAYED_TOKENS):
            began = time.process_time()
            matcher.fill(mask)
            spent = time.process_time() - began
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            began = time.process_time()
            matcher.accept(int(random.choice(allowed)))
            spent += time.process_time() - began
            whole_s += spent
            if spent > _MASK_S:
                raise _too_slow("for a token", _MASK_S)
            if whole_s > _PLAY_S:
                raise _too_slow(f"for {_PLAYED_TOKENS} tokens", _PLAY_S)
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


def _bound(memory_nbytes: int) -> None:
    """Have the kernel end this process where a grammar takes more memory or stack."""
    with Path("/proc/self/statm").open() as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, most in ((resource.RLIMIT_AS, mapped + memory_nbytes), (resource.RLIMIT_STACK, _STACK_NBYTES)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """The child."""
    # engines first: a flood of grammars must not take their CPUs
    os.nice(_NICE)
    # many are ended by a signal: none of them leaves a core
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    serve(_GrammarService())
