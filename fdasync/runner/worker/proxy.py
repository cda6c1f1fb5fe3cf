"""A runner in a process of its own: the engine's side, a proxy. `worker/main.py` is the child's side.

The engine's loop goes on while a runner imports torch, loads for minutes, blocks in a forward pass or crashes. Memory
is shared by fd; only messages and new weights (`weight_transfer.py`) are copied. The death
of the worker fails all work in flight; a worker that is stuck is killed and reaped. Knows no model. Made by
`engine/runtime.py`, and by `group/workers.py` for each rank of a group.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import msgspec

from fdasync.errors import ConfigError, FdasyncError, RunnerError, WorkerStuck
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.remote import NO_FD, Fd, forwarding, method_of
from fdasync.ipc.rpc import RpcClient
from fdasync.runner.base import Capacity, CopyOutput, Runner, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.worker.main import RunnerService
from fdasync.runner.worker.peer_blocks import WorkerPeerBlocks
from fdasync.runner.worker.weight_transfer import CHUNK_NBYTES, TensorTransfer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.ipc.exchange import Meeting
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.ipc.remote import Method
    from fdasync.request import GroupTensors, WeightsGroup
    from fdasync.runner.chosen import ChosenRows

_CHILD = "fdasync.runner.worker.main"
# a worker that is told to stop joining a group looks up in a moment, or when it has tried to connect to a lost rank
_STOPS_S = 40.0

# of every worker's environment: a program that uses NVLink multicast can put the GPUs of a whole host out of service
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

P = ParamSpec("P")
T = TypeVar("T")


@forwarding(Runner)
class WorkerRunner(Runner):
    """Proxy of a runner in a child process.

    Args:
        name: entry-point name of the runner; it is imported in the child only.
        config: its raw configuration.
        close_deadline_s: how long an idle worker may take to end before it is killed.
        chunk_nbytes: bound on each of the two chunks that tensors cross in.

    Attributes:
        environment: variables that the worker has beside this process's own, or instead of them; to be set before
            `open`.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        limits: RunnerLimits,
        *,
        close_deadline_s: float,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        super().__init__(config, limits)
        self._name = name
        self._close_deadline_s = close_deadline_s
        self._child: RpcClient | None = None
        self._transfer = TensorTransfer([self.ask_now], chunk_nbytes)
        self._meeting: tuple[Meeting, float] | None = None
        # of the last `receive_tensors` that was answered
        self._described: tuple[TensorMeta, ...] = ()
        self._told: set[asyncio.Future[None]] = set()
        # calls that steps do not wait for
        self._beside: set[asyncio.Task[Any]] = set()
        self.environment: Mapping[str, str] = {}

    @property
    def pid(self) -> int:
        """Process id of the worker; -1 before `open`."""
        return -1 if self._child is None else self._child.process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker's process id, in the form in which a group has several."""
        return (self.pid,)

    def place(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Set the environment, as that of a group's ranks is set."""
        (self.environment,) = environments

    @property
    def name(self) -> str:
        """What errors call the worker."""
        rank = f" (rank {self.limits.rank} of {self.limits.tensor_parallel})" if self.limits.tensor_parallel > 1 else ""
        return f"{self._name} worker{rank}"

    def meet(self, meeting: Meeting, deadline_s: float) -> None:
        """Have the worker join a group when it is opened, as the rank of its limits.

        Args:
            meeting: stays the caller's, and open until `open` has returned.
            deadline_s: how long the worker waits for the other ranks in each exchange.
        """
        self._meeting = meeting, deadline_s

    async def open(self) -> Capacity:
        self._child = RpcClient(
            asyncio.get_running_loop(), self.name, _CHILD, RunnerService.errors, {**self.environment, **_NO_MULTICAST}
        )
        self._child.gone.add_done_callback(self._on_gone)
        if self._meeting is not None:
            meeting, deadline_s = self._meeting
            await self._ask(RunnerService.join_ranks, meeting.seat(self.limits.rank, deadline_s))
        return await self._ask(RunnerService.load, self._name, self.config, self.limits)

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        await self._ask(Runner.bind, num_blocks, arena, host, snapshots)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        assert self._child is not None
        return self._child.call(Runner.launch, step)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        assert self._child is not None
        return self._child.call(Runner.copy, copy)

    async def lend(self, key: int, rows: ChosenRows) -> None:
        """See `Runner`. The worker maps the rows; steps go on meanwhile."""
        told = self._tell(method_of(Runner.lend), key, rows)
        try:
            await asyncio.shield(told)
        finally:
            # an error that is raised here refers to this frame, and so to the rows: no cycle keeps them
            del told

    def take_back(self, key: int) -> None:
        self._tell(method_of(Runner.take_back), key)

    def _tell(self, method: Method[Any], *args: Any) -> asyncio.Future[None]:
        """Send a call that `aclose` waits for, too, without taking the worker for busy."""
        told = self._send(method, args, {})
        self._told.add(told)
        told.add_done_callback(self._told.discard)
        # a call that was cancelled leaves an error that no caller asks for; so do rows that were not lent then
        told.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return told

    def peer_blocks(self) -> PeerBlocks | None:
        """See `Runner`. `PeerBlocks.export` tells whether the worker's runner shows its blocks."""
        if not self.limits.shows_blocks:
            return None
        return WorkerPeerBlocks(self.ask_now, lambda fd: self.ask_now(RunnerService.show_pool, fd))

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        await self._transfer.begin(tensors, _only)

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        await self._transfer.write(number, offset_nbytes, data)

    async def end_tensors(self) -> None:
        await self._transfer.end(_only)

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, _stop: Fd = NO_FD) -> None:
        """See `Runner`. Cancelling has the worker give the join up, and waits for that. Raises WorkerStuck where that
        takes too long."""
        # the worker may wait for others without reading: the end of a pipe is all that it looks at
        told, ours = os.pipe()
        try:
            asked = self.ask_now(Runner.join_group, group, interface, limit_s, Fd(told))
            try:
                await asyncio.shield(asked)
            except asyncio.CancelledError:
                os.close(ours)
                ours = -1
                await wait_within([asked], _STOPS_S)
                if not asked.done():
                    raise self.overdue("giving the join of a group up", _STOPS_S) from None
                raise
        finally:
            for fd in (told, ours):
                if fd >= 0:
                    os.close(fd)

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        # a call that is cut short may not have been sent
        described, self._described = self._described, ()
        tensors = source.tensors
        told = source if tensors is not described else msgspec.structs.replace(source, tensors=())
        await self._ask(Runner.receive_tensors, told, limit_s, first=first, last=last)
        self._described = tensors

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        return WorkerStuck(self.name, self.pid, what, deadline_s)

    async def aclose(self) -> None:
        if self._child is None:
            return
        self.on_failure = None
        for asking in self._beside:
            asking.cancel()
        if ending := self._told | self._beside:
            await wait_within(ending, self._close_deadline_s)
        closed = RunnerError("the worker is closed")
        if self._child.unanswered or self._transfer.is_open:
            # the worker is busy with a call whose answer has no reader any more
            await self._child.kill(closed)
        else:
            await self._child.close(closed, self._close_deadline_s)
        self._transfer.close()

    def ask_now(
        self, function: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Call a method of the worker; the future ends with its answer. Raises as `_send` does."""
        return self._send(method_of(function), args, kwargs)

    async def _ask(self, function: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and wait. The engine's deadlines bound the wait; cancelling it leaves the call."""
        return await asyncio.shield(self._send(method_of(function), args, kwargs))

    async def forward(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the worker's runner does, for all methods of the contract that are not written here.

        The engine's deadline for updates bounds the wait. Cancelling it leaves the call; where steps do not wait for
        the call, the worker is asked to stop it.
        """
        if not method.options.beside:
            return await asyncio.shield(self._send(method, args, kwargs))
        assert self._child is not None
        asking = asyncio.ensure_future(self._child.ask_for(method, args, kwargs))
        self._beside.add(asking)
        asking.add_done_callback(self._beside.discard)
        try:
            return await asyncio.shield(asking)
        finally:
            # it ends with the worker's word, for which nothing waits here
            asking.cancel()

    def _send(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """Call; the future ends with the answer or its error. Raises ConfigError for a call that cannot be sent."""
        assert self._child is not None
        try:
            return self._child.send(method, args, kwargs)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("runner_config", f"cannot be sent to a worker: {error}") from None

    def _on_gone(self, gone: asyncio.Future[Exception]) -> None:
        if self.on_failure is not None:
            self.on_failure(gone.result())  # of a future that is done


async def _only(answers: Sequence[asyncio.Future[None]]) -> None:
    (answer,) = answers
    await answer
