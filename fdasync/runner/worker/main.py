"""The child's side of `worker/proxy.py`: runs a runner for one engine, which is at the other end of a socket.

Steps and copies go to the runner as they come; loading, binding and new weights are done one after the other. What the
engine may call are the marked methods of `Runner`, of `PeerBlocks` and of the classes here. Knows no model. Started by
`WorkerRunner`; `main` is the whole program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import errors
from fdasync.errors import FdasyncError, InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.ipc.child import settle
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.exchange import Exchange, Seat
from fdasync.ipc.peers.blocks import PeerBlocks, PoolExport
from fdasync.ipc.remote import Fd, marked, remote
from fdasync.ipc.service import Service, serve
from fdasync.runner.base import Capacity, Runner, RunnerLimits, TensorMeta
from fdasync.runner.plugins import make_runner
from fdasync.runner.worker.peer_blocks import show
from fdasync.runner.worker.weight_transfer import TensorReceiver

if TYPE_CHECKING:
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.ipc.remote import Method
    from fdasync.request import GroupTensors
    from fdasync.runner.base import CopyOutput, StepOutput

_WORK = (RunStep, SwapOut, SwapIn)
_OF_PEERS = marked(PeerBlocks)
_OF_TENSORS = marked(TensorReceiver)


class RunnerService(Service):
    """One runner, one engine."""

    serves = (Runner, PeerBlocks, TensorReceiver)
    errors = ErrorTable(
        errors.BadInput, errors.ConfigError, errors.CheckpointError, errors.UnsupportedModel, errors.PluginError,
        errors.RunnerError, errors.WakeFailed, errors.WeightsRejected, errors.WeightsBroken,
    )  # fmt: skip

    def __init__(self) -> None:
        # calls that wait or run in turn; steps and copies behind them keep their place
        self._in_line = 0
        self._turn = asyncio.Lock()
        self._runner: Runner | None = None
        self._receiver: TensorReceiver | None = None
        self._exchange: Exchange | None = None
        # of the last `receive_tensors` that had some
        self._described: Sequence[TensorMeta] = ()

    # -- its own methods ------------------------------------------------------------------------------

    @remote()
    async def join_ranks(self, seat: Seat) -> None:
        """Be one rank of a group; comes before `load`."""
        self._exchange = seat.take()

    @remote()
    async def load(self, name: str, config: dict[str, Any], limits: RunnerLimits) -> Capacity:
        """Make a runner and open it.

        Args:
            name: of its entry point.
            config: raw; checked by the runner's own type.
        """
        self._runner = make_runner(name, config, limits)
        self._receiver = TensorReceiver(self._runner)
        if self._exchange is not None:
            self._runner.join(self._exchange)
        return await self._runner.open()

    @remote(beside=True)
    async def show_pool(self, through: Fd) -> Sequence[PoolExport]:
        """Show the pool's memory to other processes: the pools' descriptors go through a socket, in one message of a
        byte. Returns () where the runner shows none."""
        shown = None if self._runner is None else self._runner.peer_blocks()
        return () if shown is None else await show(shown, through)

    # -- the runner's, with something more --------------------------------------------------------------

    async def bind(
        self, num_blocks: int, arena: AuxArena | None, host: HostArena | None, snapshots: HostArena | None
    ) -> None:
        await self._opened().bind(num_blocks, arena, host, snapshots)
        settle()

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        """Without tensors where they are the same as in the call before: sending thousands of descriptions takes longer
        than the tensors' bytes take between GPUs."""
        self._described = source.tensors or self._described
        source = msgspec.structs.replace(source, tensors=self._described)
        await self._opened().receive_tensors(source, limit_s, first=first, last=last)

    # -- the service's ------------------------------------------------------------------------------------

    def target(self, method: Method[Any]) -> object:
        if method.name in vars(RunnerService):
            return self
        if method.name in _OF_TENSORS:
            self._opened()
            return self._receiver
        if method.name in _OF_PEERS:
            peers = self._opened().peer_blocks()
            if peers is None:
                raise RunnerError("this runner shows its blocks to no other process")
            return peers
        return self._opened()

    def _opened(self) -> Runner:
        if self._runner is None:
            raise InvariantBroken("a call came before a runner was opened")
        return self._runner

    def perform(self, method: Method[Any], message: Any, fds: list[int]) -> Awaitable[object]:
        if isinstance(message, _WORK) and not self._in_line:
            # the hot path: no task switch between the socket and the runner
            return self._start(message)
        if method.options.beside and not method.waits:
            # blocks are copied as between device and host, by a future of the runner's own
            copied: Awaitable[object] = method.call(self.target(method), message, fds)
            return copied
        if method.options.beside:
            # steps are in flight, and a step in line would be answered behind a later one
            return self.performed(method, message, fds)
        self._in_line += 1
        return self._in_turn(method, message, fds)

    async def _in_turn(self, method: Method[Any], message: Any, fds: list[int]) -> object:
        try:
            async with self._turn:
                if not isinstance(message, _WORK):
                    return await self.performed(method, message, fds)
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

    def error_of(self, message: Any, error: BaseException) -> FdasyncError:
        if not isinstance(message, _WORK):
            return super().error_of(message, error)
        problem = error.problem if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
        return self.otherwise(message, problem)

    def otherwise(self, message: Any, problem: str) -> RunnerError:
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


def main() -> None:
    """The child's program: serve one runner."""
    serve(RunnerService())
