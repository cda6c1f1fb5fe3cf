"""The child's side of `worker/proxy.py`: runs a runner for one engine, which is at the other end of a socket.

Steps and copies go to the runner as they come; loading, binding and new weights are done one after the other. Knows no
model. Started by `WorkerRunner`; `main` is the whole program.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.errors import FdasyncError, InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.ipc.child import settle
from fdasync.ipc.exchange import Exchange
from fdasync.ipc.peer_blocks import BlockPull
from fdasync.ipc.service import Service, serve
from fdasync.runner.chosen import ChosenRows
from fdasync.runner.plugins import make_runner
from fdasync.runner.worker.messages import (
    ERRORS,
    BeginTensors,
    Bind,
    CheckGrammar,
    CloseSource,
    DeltaBase,
    EndReceived,
    FingerprintWeights,
    ForgetWeights,
    Join,
    JoinGroup,
    LeaveGroup,
    Lend,
    LoadFolder,
    Open,
    OpenSource,
    ReachGroup,
    ReadWeightsId,
    ReceiveTensors,
    Regain,
    Release,
    Request,
    ShowPool,
    SumBlocks,
    TakeBack,
    WriteChunk,
    error_of,
)
from fdasync.runner.worker.peer_blocks import show
from fdasync.runner.worker.weight_transfer import TensorReceiver

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from fdasync.ipc.peer_blocks import PeerBlocks
    from fdasync.runner.base import CopyOutput, Runner, StepOutput, TensorMeta


class _RunnerService(Service):
    """One runner, one engine."""

    messages = Request | RunStep | SwapOut | SwapIn
    errors = ERRORS

    def __init__(self) -> None:
        # calls that wait or run in turn; steps and copies behind them keep their place
        self._in_line = 0
        self._turn = asyncio.Lock()
        self._runner: Runner | None = None
        self._receiver: TensorReceiver | None = None
        self._exchange: Exchange | None = None
        # of the last `ReceiveTensors` that had some
        self._described: tuple[TensorMeta, ...] = ()

    def perform(self, message: Request | RunStep | SwapOut | SwapIn, fds: list[int]) -> Awaitable[object]:
        if isinstance(message, (RunStep, SwapOut, SwapIn)) and not self._in_line:
            # the hot path: no task switch between the socket and the runner
            return self._start(message)
        if isinstance(message, CheckGrammar | ReachGroup):
            # beside the line: steps are in flight, and a step in line would be answered behind a later one
            return self._beside(message)
        if isinstance(message, BlockPull | SumBlocks):
            # as a copy between device and host: what may meet it is the engine's care
            peers = self._peers()
            return peers.pull(message) if isinstance(message, BlockPull) else peers.sums(message.blocks)
        if isinstance(message, ShowPool | OpenSource | CloseSource):
            return self._join_peers(message, fds)
        self._in_line += 1
        return self._in_turn(message, fds)

    async def _beside(self, message: CheckGrammar | ReachGroup) -> None:
        if self._runner is None:
            raise InvariantBroken(f"{type(message).__name__} before a runner was opened")
        if isinstance(message, CheckGrammar):
            await self._runner.check_grammar(message.grammar)
        else:
            await self._runner.reach_group(message.group)

    def _peers(self) -> PeerBlocks:
        peers = None if self._runner is None else self._runner.peer_blocks()
        if peers is None:
            raise RunnerError("this runner shows its blocks to no other process")
        return peers

    async def _join_peers(self, message: ShowPool | OpenSource | CloseSource, fds: list[int]) -> object:
        if isinstance(message, ShowPool):
            shown = None if self._runner is None else self._runner.peer_blocks()
            return () if shown is None else await show(shown, fds[0])
        if isinstance(message, OpenSource):
            await self._peers().open(message.source, message.pools, fds)
        else:
            await self._peers().close_source(message.source)
        return None

    async def _in_turn(self, message: Request | RunStep | SwapOut | SwapIn, fds: list[int]) -> object:
        try:
            async with self._turn:
                if not isinstance(message, (RunStep, SwapOut, SwapIn)):
                    return await self._perform(message, fds)
                started = self._start(message)
            # cancelling this task must not cancel the runner's own future
            await asyncio.wait([started])
            return started.result()  # of a future that is done
        finally:
            # of a step or a copy once it has ended: a later one on the hot path would be answered first
            self._in_line -= 1

    def _start(self, message: RunStep | SwapOut | SwapIn) -> asyncio.Future[StepOutput] | asyncio.Future[CopyOutput]:
        """Begin a step or a copy. A runner must not raise here; if it does, the engine gets a RunnerError."""
        assert self._runner is not None
        try:
            if not isinstance(message, RunStep):
                return self._runner.copy(message)
            begun = self._runner.launch(message)
            if self._exchange is not None:
                self._exchange.begin_step()
            return begun
        except Exception as error:
            what = "launch" if isinstance(message, RunStep) else "copy"
            raise RunnerError(f"{what} raised {type(error).__name__}: {error}") from error

    async def _perform(self, message: Request, fds: list[int]) -> object:
        if isinstance(message, Join):
            taken = fds.copy()
            fds.clear()
            self._exchange = Exchange(
                message.rank, message.ranks, taken, deadline_s=message.deadline_s, slot_nbytes=message.slot_nbytes
            )
            return None
        if isinstance(message, Open):
            self._runner = make_runner(message.runner, message.config, message.limits)
            if self._exchange is not None:
                self._runner.join(self._exchange)
            return await self._runner.open()
        runner = self._runner
        if runner is None:
            raise InvariantBroken(f"{type(message).__name__} before a runner was opened")
        if isinstance(message, Bind):
            arena = host = None
            if message.specs:
                arena = AuxArena.attach(
                    fds.pop(0), message.num_slots, message.block_tokens, message.specs, message.picks
                )
            if message.num_host_blocks:
                host = HostArena.attach(fds.pop(0), message.num_host_blocks, message.block_nbytes)
            snapshots = None
            if message.num_host_snapshots:
                snapshots = HostArena.attach(fds.pop(0), message.num_host_snapshots, message.snapshot_nbytes)
            await runner.bind(message.num_blocks, arena, host, snapshots)
            settle()
        elif isinstance(message, Lend):
            await runner.lend(message.key, ChosenRows.attach(fds.pop(0), message.shape, message.start, message.most))
        elif isinstance(message, TakeBack):
            runner.take_back(message.key)
        elif isinstance(message, Release):
            await runner.release_memory(message.parts, keep_weights=message.keep_weights)
        elif isinstance(message, Regain):
            await runner.regain_memory(message.part)
        elif isinstance(message, LoadFolder):
            return await runner.load_folder(message.path)
        elif isinstance(message, ReadWeightsId):
            return await runner.read_weights_id(message.path)
        elif isinstance(message, DeltaBase):
            return await runner.delta_base(message.path)
        elif isinstance(message, ForgetWeights):
            await runner.forget_weights()
        elif isinstance(message, FingerprintWeights):
            return await runner.fingerprint_weights(message.with_tensors)
        elif isinstance(message, JoinGroup | LeaveGroup | ReceiveTensors | EndReceived):
            await self._of_group(runner, message, fds)
        elif isinstance(message, BeginTensors):
            self._forget_tensors()
            receiver = TensorReceiver(runner, fds, message.chunk_nbytes)
            try:
                await runner.begin_tensors(message.tensors)
            except BaseException:
                receiver.close()
                raise
            self._receiver = receiver
        elif self._receiver is None:
            raise InvariantBroken(f"{type(message).__name__} without BeginTensors")
        elif isinstance(message, WriteChunk):
            await self._receiver.write(message)
        else:
            self._forget_tensors()
            await runner.end_tensors()
        return None

    def _forget_tensors(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def error_of(self, message: Request | RunStep | SwapOut | SwapIn, error: BaseException) -> FdasyncError:
        if not isinstance(message, (RunStep, SwapOut, SwapIn)):
            return error_of(error)
        problem = error.problem if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
        return RunnerError(problem, message.step_id if isinstance(message, RunStep) else -1)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        # calls that are no tasks are futures of the runner
        tasks = [call for call in calls if isinstance(call, asyncio.Task)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._runner is not None:
            await self._runner.aclose()
        if self._exchange is not None:
            self._exchange.close()

    async def _of_group(
        self, runner: Runner, message: JoinGroup | LeaveGroup | ReceiveTensors | EndReceived, fds: list[int]
    ) -> None:
        if isinstance(message, JoinGroup):
            await runner.join_group(message.group, message.interface, message.limit_s, fds[0])
        elif isinstance(message, LeaveGroup):
            await runner.leave_group(message.name)
        elif isinstance(message, ReceiveTensors):
            self._described = message.source.tensors or self._described
            source = msgspec.structs.replace(message.source, tensors=self._described)
            await runner.receive_tensors(source, message.limit_s, first=message.first, last=message.last)
        else:
            await runner.end_received()


def main() -> None:
    """The child's program: serve one runner."""
    serve(_RunnerService())
