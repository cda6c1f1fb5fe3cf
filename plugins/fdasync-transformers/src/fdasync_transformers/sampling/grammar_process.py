"""Checks grammars of callers in a child process, so that the worse ones cost no engine's loop more than a moment.

The child loads the tokenizer once, and checks each grammar in a fork of its own (`grammar_check.py`): ending one check
costs the others nothing but its time. Knows no model and no steps. `GrammarProcess` is the parent's side, called by
`runner.py`; `main` is the child.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput, CheckpointError, EngineClosed, WorkerDied, WorkerStuck
from fdasync.ipc.child import settle
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import remote
from fdasync.ipc.rpc import RpcClient
from fdasync.ipc.service import Service, serve
from fdasync.request import Grammar
from fdasync_transformers.sampling.grammar_check import check_apart
from fdasync_transformers.sampling.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Sequence

# checks at a time: a slow one must not hold up all others
_AT_ONCE = 2
# a check has a deadline in the child; if there is no answer by now, the child does not run
_ANSWER_S = 40.0
_LEAVE_S = 5.0
_LOAD_S = 60.0
#: what each check may allocate
MEMORY_NBYTES = 512 << 20
_NICE = 19


class GrammarProcess:
    """One child for one tokenizer; it starts with the first check, and again where something ended it.

    Args:
        tokenizer, vocab_size, eos_ids: as `Grammars` takes them.
        memory_nbytes: what each check may allocate.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int], *, memory_nbytes: int = MEMORY_NBYTES
    ) -> None:
        self._asked = str(tokenizer), vocab_size, tuple(eos_ids), memory_nbytes
        self._child: RpcClient | None = None
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._loading = asyncio.Lock()
        # of the child: done once it has loaded, also where the caller for whom it was started has left
        self._loads: asyncio.Future[None] | None = None
        self._closed = False

    async def check(self, grammar: Grammar) -> None:
        """Returns for a grammar that can be kept at a bounded cost. Cancelling ends the check.

        Raises BadInput, which says what is wrong or too slow; CheckpointError; WorkerDied and WorkerStuck where the
        child does not serve; EngineClosed.
        """
        async with self._places:
            try:
                await self._ask(await self._loaded(), grammar)
            except WorkerDied:
                # no grammar runs in the child itself: something outside ended it
                await self._ask(await self._loaded(), grammar)

    async def _ask(self, child: RpcClient, grammar: Grammar) -> None:
        asking = asyncio.ensure_future(child.ask(GrammarService.check, grammar))
        try:
            async with Within(_ANSWER_S):
                await asyncio.shield(asking)
        except TimeoutError:
            stuck = WorkerStuck("grammar", child.process.pid, "a grammar", _ANSWER_S)
            await child.kill(stuck)
            raise stuck from None
        finally:
            if not asking.done():
                # the child ends the fork, and says so
                asking.cancel()
                await wait_within([asking], _LEAVE_S)
                if not asking.done():
                    await child.kill(WorkerStuck("grammar", child.process.pid, "a check that was left", _LEAVE_S))
            await asyncio.gather(asking, return_exceptions=True)

    async def _loaded(self) -> RpcClient:
        async with self._loading:
            if self._closed:
                raise EngineClosed("closed")
            child = self._child
            if child is None or child.ending is not None or self._loads is None:
                child = RpcClient(asyncio.get_running_loop(), "grammar", __name__, GrammarService.errors)
                self._child = child
                self._loads = child.call(GrammarService.load, *self._asked)
            try:
                async with Within(_LOAD_S):
                    await asyncio.shield(self._loads)
            except TimeoutError:
                stuck = WorkerStuck("grammar", child.process.pid, "loading a tokenizer", _LOAD_S)
                await child.kill(stuck)
                raise stuck from None
            return child

    async def aclose(self) -> None:
        """Kill the child (it holds nothing), and fail the checks under way; idempotent."""
        self._closed = True
        if self._child is not None:
            await self._child.kill(EngineClosed("closed"))


class GrammarService(Service):
    """The grammars of one tokenizer in the child."""

    errors = ErrorTable(BadInput, CheckpointError)

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._memory_nbytes = 0

    @remote()
    async def load(self, tokenizer: str, vocab_size: int, eos_ids: tuple[int, ...], memory_nbytes: int) -> None:
        """Use this tokenizer.json, of a model with this vocabulary and these EOS ids; each check may allocate so much.

        Raises CheckpointError.
        """
        try:
            self._grammars = Grammars(Path(tokenizer), vocab_size, eos_ids)
        except (BadInput, CheckpointError):
            raise
        except Exception as error:
            raise CheckpointError(tokenizer, f"{type(error).__name__}: {error}") from error
        self._memory_nbytes = memory_nbytes
        # a fork shares what no collection touches
        settle()

    @remote()
    async def check(self, grammar: Grammar) -> None:
        """Check this grammar. Raises BadInput."""
        assert self._grammars is not None
        await check_apart(self._grammars, grammar, self._memory_nbytes)

    def otherwise(self, message: Any, problem: str) -> BadInput:  # noqa: ARG002 - the contract's
        return BadInput("grammar", f"cannot be checked: {problem}")

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Forks end with this process."""


def main() -> None:
    """The child."""
    # engines first: a flood of grammars must not take their CPUs
    os.nice(_NICE)
    # many forks are ended by a signal: none of them leaves a core
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    serve(GrammarService())
