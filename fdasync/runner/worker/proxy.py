"""A runner in a process of its own: the engine's side, a proxy. `worker/main.py` is the child's side.

The engine's loop goes on while a runner imports torch, loads for minutes, blocks in a forward pass or crashes. Memory
is shared by fd; only the messages of `worker/messages.py` and new weights (`weight_transfer.py`) are copied. The death
of the worker fails all work in flight; a worker that is stuck is killed and reaped. Knows no model. Made by
`engine/runtime.py`, and by `group/workers.py` for each rank of a group.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from fdasync.errors import ConfigError, FdasyncError, RunnerError, WorkerStuck
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.rpc import RpcClient
from fdasync.request import WeightsFingerprint
from fdasync.runner.base import Capacity, CopyOutput, Runner, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.worker.messages import (
    ERRORS,
    Bind,
    CheckGrammar,
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
    ReachGroup,
    ReadWeightsId,
    ReceiveTensors,
    Regain,
    Release,
    Request,
    TakeBack,
)
from fdasync.runner.worker.peer_blocks import WorkerPeerBlocks
from fdasync.runner.worker.weight_transfer import CHUNK_NBYTES, TensorTransfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync.cache.aux import AuxSpec
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.ipc.exchange import Meeting
    from fdasync.ipc.peer_blocks import PeerBlocks
    from fdasync.request import Grammar, GroupTensors, MemoryPart, WeightsGroup
    from fdasync.runner.chosen import ChosenRows

_CHILD = "fdasync.runner.worker.main"
_CAPACITY = msgspec.msgpack.Decoder(Capacity)
_NOTHING = msgspec.msgpack.Decoder(None)
_WEIGHTS_ID = msgspec.msgpack.Decoder(str)
_FINGERPRINT = msgspec.msgpack.Decoder(WeightsFingerprint)
_STEP = msgspec.msgpack.Decoder(StepOutput)
_COPY = msgspec.msgpack.Decoder(CopyOutput)

# a worker that is told to stop joining a group looks up in a moment, or when it has tried to connect to a lost rank
_STOPS_S = 40.0

# of every worker's environment: a program that uses NVLink multicast can put the GPUs of a whole host out of service
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

T = TypeVar("T")


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
        # of the last `ReceiveTensors` that was answered
        self._described: tuple[TensorMeta, ...] = ()
        self._told: set[asyncio.Future[None]] = set()
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
            asyncio.get_running_loop(), self.name, _CHILD, ERRORS, {**self.environment, **_NO_MULTICAST}
        )
        self._child.gone.add_done_callback(self._on_gone)
        if self._meeting is not None:
            meeting, deadline_s = self._meeting
            join = Join(self.limits.rank, meeting.ranks, deadline_s, meeting.slot_nbytes)
            await self._ask(join, _NOTHING, meeting.fds(self.limits.rank))
        return await self._ask(Open(self._name, self.config, self.limits), _CAPACITY)

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        fds = []
        num_slots, block_tokens = 0, 0
        specs: tuple[AuxSpec, ...] = ()
        picks = None
        if arena is not None:
            num_slots, block_tokens, specs = arena.num_slots, arena.block_tokens, arena.specs
            picks = None if arena.picks is None else arena.picks.shape
            fds.append(arena.region.fd)
        num_host_blocks, block_nbytes = 0, 0
        if host is not None:
            num_host_blocks, block_nbytes = host.num_blocks, host.block_nbytes
            fds.append(host.region.fd)
        num_host_snapshots, snapshot_nbytes = 0, 0
        if snapshots is not None:
            num_host_snapshots, snapshot_nbytes = snapshots.num_blocks, snapshots.block_nbytes
            fds.append(snapshots.region.fd)
        message = Bind(
            num_blocks=num_blocks,
            num_slots=num_slots,
            block_tokens=block_tokens,
            specs=specs,
            num_host_blocks=num_host_blocks,
            block_nbytes=block_nbytes,
            picks=picks,
            num_host_snapshots=num_host_snapshots,
            snapshot_nbytes=snapshot_nbytes,
        )
        await self._ask(message, _NOTHING, fds)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        assert self._child is not None
        return self._child.send(step, _STEP)

    async def lend(self, key: int, rows: ChosenRows) -> None:
        """See `Runner`. The worker maps the rows; steps go on meanwhile."""
        # the call may be cancelled, and the caller close its own, before the message is on its way
        fd = os.dup(rows.region.fd)
        told = self._tell(Lend(key, rows.shape, rows.start, rows.most), (fd,))
        told.add_done_callback(lambda _: os.close(fd))
        try:
            await asyncio.shield(told)
        finally:
            # an error that is raised here refers to this frame, and so to the rows: no cycle keeps them
            del told

    def take_back(self, key: int) -> None:
        self._tell(TakeBack(key))

    def _tell(self, message: Lend | TakeBack, fds: Sequence[int] = ()) -> asyncio.Future[None]:
        """Send a message that `aclose` waits for, too, without taking the worker for busy."""
        told = self._send(message, _NOTHING, fds)
        self._told.add(told)
        told.add_done_callback(self._told.discard)
        # a call that was cancelled leaves an error that no caller asks for; so do rows that were not lent then
        told.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return told

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        assert self._child is not None
        return self._child.send(copy, _COPY)

    def peer_blocks(self) -> PeerBlocks | None:
        """See `Runner`. `PeerBlocks.export` tells whether the worker's runner shows its blocks."""
        return WorkerPeerBlocks(self._send) if self.limits.shows_blocks else None

    async def check_grammar(self, grammar: Grammar) -> None:
        """See `Runner`. Cancelling has the worker stop: checks that clients left must not queue up before others."""
        await self._ask_beside(CheckGrammar(grammar))

    async def load_folder(self, path: str) -> str:
        """See `Runner`. The engine's deadline for updates bounds the wait here and in all calls for weights below."""
        return await self._ask(LoadFolder(path), _WEIGHTS_ID)

    async def read_weights_id(self, path: str) -> str:
        return await self._ask(ReadWeightsId(path), _WEIGHTS_ID)

    async def delta_base(self, path: str) -> str:
        return await self._ask(DeltaBase(path), _WEIGHTS_ID)

    async def forget_weights(self) -> None:
        await self._ask(ForgetWeights(), _NOTHING)

    async def fingerprint_weights(self, with_tensors: bool = False) -> WeightsFingerprint:
        return await self._ask(FingerprintWeights(with_tensors), _FINGERPRINT)

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        await self._transfer.begin(tensors, _only)

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        await self._transfer.write(number, offset_nbytes, data)

    async def end_tensors(self) -> None:
        await self._transfer.end(_only)

    async def reach_group(self, group: WeightsGroup) -> None:
        """See `Runner`. Cancelling has the worker stop."""
        await self._ask_beside(ReachGroup(group))

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, _stop: int = -1) -> None:
        """See `Runner`. Cancelling has the worker give the join up, and waits for that. Raises WorkerStuck where that
        takes too long."""
        # the worker may wait for others without reading: the end of a pipe is all that it looks at
        told, ours = os.pipe()
        try:
            asked = self._send(JoinGroup(group, interface, limit_s), _NOTHING, [told])
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

    async def leave_group(self, name: str) -> None:
        await self._ask(LeaveGroup(name), _NOTHING)

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        # a call that is cut short may not have been sent
        described, self._described = self._described, ()
        tensors = source.tensors
        told = source if tensors is not described else msgspec.structs.replace(source, tensors=())
        await self._ask(ReceiveTensors(told, limit_s, first, last), _NOTHING)
        self._described = tensors

    async def end_received(self) -> None:
        await self._ask(EndReceived(), _NOTHING)

    async def release_memory(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """See `Runner`. The engine's deadline for updates bounds the wait here and in `regain_memory`."""
        await self._ask(Release(tuple(parts), keep_weights), _NOTHING)

    async def regain_memory(self, part: MemoryPart) -> None:
        await self._ask(Regain(part), _NOTHING)

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        return WorkerStuck(self.name, self.pid, what, deadline_s)

    async def aclose(self) -> None:
        if self._child is None:
            return
        self.on_failure = None
        if self._told:
            await wait_within(self._told, self._close_deadline_s)
        closed = RunnerError("the worker is closed")
        if self._child.unanswered or self._transfer.is_open:
            # the worker is busy with a call whose answer has no reader any more
            await self._child.kill(closed)
        else:
            await self._child.close(closed, self._close_deadline_s)
        self._transfer.close()

    def ask_now(self, message: Request, fds: Sequence[int] = ()) -> asyncio.Future[None]:
        """Send a message whose answer has no value; the future ends with the answer. Raises as `_send` does."""
        return self._send(message, _NOTHING, fds)

    async def _ask(self, message: Request, kind: msgspec.msgpack.Decoder[T], fds: Sequence[int] = ()) -> T:
        """Send and wait for the answer. The engine's deadlines bound the wait; cancelling it leaves the call."""
        return await asyncio.shield(self._send(message, kind, fds))

    async def _ask_beside(self, message: CheckGrammar | ReachGroup) -> None:
        """A call that steps do not wait for; cancelling it has the worker stop."""
        assert self._child is not None
        asking = asyncio.ensure_future(self._child.ask(message, _NOTHING))
        try:
            await asyncio.shield(asking)
        finally:
            # it ends with the worker's word, for which nothing waits here
            asking.cancel()

    def _send(self, message: Request, kind: msgspec.msgpack.Decoder[T], fds: Sequence[int] = ()) -> asyncio.Future[T]:
        """Send; the future ends with the answer or its error. Raises ConfigError for a message that cannot be sent."""
        assert self._child is not None
        try:
            return self._child.send(message, kind, fds=fds)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("runner_config", f"cannot be sent to a worker: {error}") from None

    def _on_gone(self, gone: asyncio.Future[Exception]) -> None:
        if self.on_failure is not None:
            self.on_failure(gone.result())  # of a future that is done


async def _only(answers: Sequence[asyncio.Future[None]]) -> None:
    (answer,) = answers
    await answer
