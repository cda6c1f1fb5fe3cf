"""Several runners as one: each call goes to all ranks, and ends when all have answered.

A step is sent to every rank in one turn of the loop, before any answer is awaited, and its output is rank 0's. The
arena of rows goes to rank 0 alone, the host arena to all. What goes wrong on one rank fails the group, and the error
names the rank. Knows no processes: `workers.py` extends it by them. Called as any runner; made by `workers.py`, and by
tests of runners in one process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from fdasync.errors import (
    DeadlineExceeded,
    FdasyncError,
    InvariantBroken,
    RunnerError,
    WakeFailed,
    WeightsBroken,
    WeightsRejected,
    WorkerStuck,
)
from fdasync.events.actions import SwapOut
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync.ipc.remote import NO_FD, Fd, forwarding
from fdasync.runner.base import Capacity, CopyOutput, Runner, StepOutput
from fdasync.runner.group.calls import Call
from fdasync.runner.group.capacity import agreed
from fdasync.runner.group.errors import of_rank, rank_name
from fdasync.runner.group.peer_blocks import GroupPeerBlocks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.ipc.remote import Method
    from fdasync.request import MemoryPart, WeightsGroup

T = TypeVar("T")

# how long steps before a failed step may take: a rank may wait for ever for a failed rank
_GRACE_S = 1.0


@forwarding(Runner)
class GroupRunner(Runner):
    """See the module.

    Args:
        ranks: in order, none of them opened; each was made with its `RunnerLimits.rank`, and has joined its exchange,
            if it needs one. The group closes them.

    After the failure of one rank, steps before the failed one have a second to end; then all steps fail, in order.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, ranks: Sequence[Runner]) -> None:
        super().__init__(ranks[0].config, ranks[0].limits)
        self._ranks = tuple(ranks)
        self._block_nbytes = self._snapshot_nbytes = 0
        self._steps: deque[Call[StepOutput]] = deque()
        self._copies: dict[int, Call[CopyOutput]] = {}
        self._asked: Call[Any] | None = None
        self._grace: DeadlineTimer | None = None
        for rank, runner in enumerate(self._ranks):
            # a registration: ranks are older than their group
            runner.on_failure = partial(self._rank_failed, rank)

    async def open(self) -> Capacity:
        """See `Runner`. The first rank that fails ends the wait for the others, which `aclose` ends."""
        capacity = agreed(await self._ask("opening", [runner.open() for runner in self._ranks]))
        self._block_nbytes, self._snapshot_nbytes = capacity.block_nbytes, capacity.snapshot_nbytes
        return capacity

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        arenas = [arena, *[None] * (len(self._ranks) - 1)]
        calls = [runner.bind(num_blocks, own, host, snapshots) for runner, own in zip(self._ranks, arenas, strict=True)]
        await self._ask("binding", calls)

    def peer_blocks(self) -> PeerBlocks | None:
        shown = [peers for runner in self._ranks if (peers := runner.peer_blocks()) is not None]
        return GroupPeerBlocks(shown, self._named) if len(shown) == len(self._ranks) else None

    # -- steps and copies: no await between the ranks -------------------------------------------------

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        done: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        call = Call(f"step {step.step_id}", len(self._ranks), done)
        self._steps.append(call)
        for rank, runner in enumerate(self._ranks):
            runner.launch(step).add_done_callback(partial(self._stepped, call, step.step_id, rank))
        return done

    def _stepped(self, call: Call[StepOutput], step_id: int, rank: int, answered: asyncio.Future[StepOutput]) -> None:
        output = self._take(call, rank, answered)
        if output is not None:
            self._check_number(call, rank, "step", step_id, output.step_id)
            if rank == 0:
                call.answer = output
        if not call.left or call.error is not None:
            self._settle(call)

    def _settle(self, ended: Call[StepOutput]) -> None:
        """End the steps that can end, in order; a failed step behind others starts the grace."""
        steps = self._steps
        while steps and (steps[0].error is not None or not steps[0].left):
            steps.popleft().end()
        if steps and ended.error is not None and self._grace is None:
            loop = asyncio.get_running_loop()
            self._grace = DeadlineTimer(loop, loop.time() + _GRACE_S, partial(self._give_up, ended.error))

    def _give_up(self, error: BaseException) -> None:
        """Fail all steps that are left, oldest first."""
        while self._steps:
            call = self._steps.popleft()
            call.error = call.error or error
            call.end()

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        done: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()
        call = self._copies[copy.copy_id] = Call(f"copy {copy.copy_id}", len(self._ranks), done)
        for rank, runner in enumerate(self._ranks):
            runner.copy(copy).add_done_callback(partial(self._copied, call, copy, rank))
        return done

    def _copied(
        self, call: Call[CopyOutput], copy: SwapOut | SwapIn, rank: int, answered: asyncio.Future[CopyOutput]
    ) -> None:
        output = self._take(call, rank, answered)
        if output is not None:
            self._check_number(call, rank, "copy", copy.copy_id, output.copy_id)
            call.nbytes += output.kv_nbytes
        if call.left and call.error is None:
            return
        self._copies.pop(copy.copy_id, None)
        whole = len(copy.device) * self._block_nbytes + len(copy.snapshots) * self._snapshot_nbytes
        if isinstance(copy, SwapOut) and call.nbytes != whole and call.error is None:
            problem = f"the ranks wrote {call.nbytes} bytes in copy {copy.copy_id} of {whole}: each byte has one writer"
            call.error = RunnerError(problem)
        call.answer = CopyOutput(copy.copy_id, whole, 0)
        call.end()

    def _take(self, call: Call[T], rank: int, answered: asyncio.Future[T]) -> T | None:
        """Note a rank's answer: its value, or None where it failed."""
        call.left.discard(rank)
        error = RunnerError("it stopped") if answered.cancelled() else answered.exception()
        if error is None:
            return answered.result()  # of a future that is done
        call.error = call.error or self._named(error, rank)
        return None

    def _check_number(self, call: Call[Any], rank: int, kind: str, asked: int, answered: int) -> None:
        if answered != asked:
            name = rank_name(rank, len(self._ranks))
            call.error = call.error or InvariantBroken(f"{name} completed {kind} {answered} as {kind} {asked}")

    # -- new weights ------------------------------------------------------------------------------------

    # positions that indexers choose are told by runners of one process alone
    lend = Runner.lend
    take_back = Runner.take_back

    async def forward(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the ranks do, for all methods of the contract that are not written here: rank 0's answer. A call that
        steps do not wait for, and a folder that is the same for all, is rank 0's alone."""
        ranks = self._ranks if method.options.ranks == "all" else self._ranks[:1]
        calls = [getattr(runner, method.name)(*args, **kwargs) for runner in ranks]
        if method.options.beside and len(calls) == 1:
            return await calls[0]
        if method.options.changes:
            return (await self._change(method.options.words, calls))[0]
        return (await self._ask(method.options.words, calls, beside=method.options.beside))[0]

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, _stop: Fd = NO_FD) -> None:
        """See `Runner`: every rank joins, one behind the other, so that each receives the tensors and takes its share.
        Cancelling has all of them give it up, and waits for that."""
        ranks = [msgspec.structs.replace(group, rank=group.rank + rank) for rank in range(len(self._ranks))]
        calls = [
            asyncio.ensure_future(runner.join_group(own, interface, limit_s))
            for runner, own in zip(self._ranks, ranks, strict=True)
        ]
        try:
            tasks = await self._all("joining a group", calls, bearable=WeightsRejected)
        except asyncio.CancelledError:
            # each was told to stop, and is killed where it does not
            await asyncio.wait(calls)
            stuck = {
                rank: error for rank, call in enumerate(calls) if isinstance(error := _error_of(call), WorkerStuck)
            }
            self._raise_first(stuck)
            raise
        errors = {rank: error for rank, task in enumerate(tasks) if (error := task.exception()) is not None}
        if errors:
            await self.leave_group(group.name)
            self._raise_first(errors)

    async def _change(self, what: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        """Ask all ranks for a change of weights. A refusal stands only where all ranks refuse; else it breaks them."""
        tasks = await self._all(what, calls, bearable=WeightsRejected)
        refusals = [(rank, task.exception()) for rank, task in enumerate(tasks) if task.exception() is not None]
        if not refusals:
            return [task.result() for task in tasks]  # they are done
        rank, refusal = refusals[0]
        assert isinstance(refusal, WeightsRejected)
        if len(refusals) == len(tasks):
            raise self._named(refusal, rank)
        raise self._named(WeightsBroken(f"{refusal.problem}; other ranks have taken them"), rank) from refusal

    # -- sleep ------------------------------------------------------------------------------------------

    async def regain_memory(self, part: MemoryPart) -> None:
        """See `Runner`. If only some ranks get the part back, these release it again."""
        tasks = await self._all(
            "taking memory back", [runner.regain_memory(part) for runner in self._ranks], bearable=WakeFailed
        )
        failed = [(rank, task.exception()) for rank, task in enumerate(tasks) if task.exception() is not None]
        if not failed:
            return
        # weights that were kept are still in host memory, and dropped ones have no content yet
        woken = [runner for runner, task in zip(self._ranks, tasks, strict=True) if task.exception() is None]
        await self._ask(
            "releasing memory again", [runner.release_memory((part,), keep_weights=True) for runner in woken]
        )
        rank, error = failed[0]
        assert isinstance(error, WakeFailed)
        raise self._named(error, rank)

    # -- ends ---------------------------------------------------------------------------------------------

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        """See `Runner`. Names the ranks that have not answered; the error is from the rank that others wait for."""
        every: list[Call[Any]] = [*self._steps, *self._copies.values()]
        if self._asked is not None:
            every.append(self._asked)
        call = next((call for call in every if call.what == what), every[0] if every else None)
        late = [] if call is None else sorted(call.left)
        if not late:
            return DeadlineExceeded(what, deadline_s)
        progress = self._progress()
        told = f"{what} (no answer of: {', '.join(map(str, late))}"
        for name, counts in progress.items():
            told += f"; {name}: {', '.join(map(str, counts))}"
        blamed = late[0]
        if stopped := self._stopped():
            told += f"; stopped: {', '.join(map(str, stopped))}"
            blamed = stopped[0]
        elif progress:
            # the others wait for this one, which may even have answered
            behind = [*zip(*progress.values(), strict=True)]
            blamed = min(range(len(behind)), key=lambda rank: (behind[rank], rank not in late))
        return self._named(self._ranks[blamed].overdue(f"{told})", deadline_s), blamed)

    def _stopped(self) -> list[int]:
        """Ranks whose processes are stopped, by a signal or a debugger."""
        return []

    def _progress(self) -> dict[str, list[int]]:
        """How far each rank has come, by what is counted; first what the others wait for; empty: not known."""
        return {}

    async def aclose(self) -> None:
        """See `Runner`. All ranks close at the same time. Raises the first error, with notes of the others."""
        if self._grace is not None:
            self._grace.cancel()
        self.on_failure = None
        errors = await asyncio.gather(*[runner.aclose() for runner in self._ranks], return_exceptions=True)
        open_calls: list[Call[Any]] = [*self._steps, *self._copies.values()]
        for call in open_calls:
            call.error = call.error or RunnerError("the group is closed")
            call.end()
        self._steps.clear()
        self._copies.clear()
        self._raise_first({rank: error for rank, error in enumerate(errors) if error is not None})

    def _named(self, error: BaseException, rank: int) -> FdasyncError:
        return of_rank(error, rank, len(self._ranks))

    def _rank_failed(self, rank: int, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(self._named(error, rank))

    async def _ask(self, what: str, calls: Sequence[Awaitable[T]], *, beside: bool = False) -> list[T]:
        """Begin one call on each rank, and wait for all answers. Raises as `_all` does. `beside`: other calls go on."""
        return [task.result() for task in await self._all(what, calls, beside=beside)]  # they are done

    async def _all(
        self,
        what: str,
        calls: Sequence[Awaitable[T]],
        *,
        bearable: type[Exception] | tuple[()] = (),
        beside: bool = False,
    ) -> list[asyncio.Future[T]]:
        """Begin one call on each rank; returns them done. The caller's deadline bounds the wait.

        Raises the first error at once, without waiting for other ranks, which may wait for that rank; of several at
        once the lowest rank's, with notes of the others. Errors of the class `bearable` stay in their futures.
        """
        tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(call) for call in calls]
        asked = Call[Any](what, len(tasks))
        if not beside:
            # what `overdue` speaks of
            self._asked = asked
        for task in tasks:
            # counts as read, also where another error or a cancelling ends the wait
            task.add_done_callback(_read)
        left: set[asyncio.Future[T]] = set(tasks)
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                errors: dict[int, BaseException] = {}
                for rank in [rank for rank, task in enumerate(tasks) if task in done]:
                    asked.left.discard(rank)
                    error = RunnerError("it stopped") if tasks[rank].cancelled() else tasks[rank].exception()
                    if error is not None and not isinstance(error, bearable):
                        errors[rank] = error
                self._raise_first(errors)
        finally:
            for task in left:
                task.cancel()
        return tasks

    def _raise_first(self, errors: Mapping[int, BaseException]) -> None:
        """Raise the error of the lowest rank, with notes of errors that say something else."""
        named = [self._named(error, rank) for rank, error in sorted(errors.items())]
        if named:
            for later in named[1:]:
                if str(later) != str(named[0]):
                    named[0].add_note(f"and then: {type(later).__name__}: {later}")
            raise named[0]


def _error_of(done: asyncio.Future[Any]) -> BaseException | None:
    return None if done.cancelled() else done.exception()


def _read(done: asyncio.Future[Any]) -> None:
    _error_of(done)
