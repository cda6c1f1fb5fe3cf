"""Holds the parts of one instance that its services share (engine, links, transports), and sends their messages.

Knows no requests and no leases, and decides nothing. Made by `instance.py`; its services call it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from fdasync.errors import DeadlineExceeded, InvariantBroken, PeerBusy, PeerRefused, PeerUnreachable
from fdasync.ipc.peers.blocks import DIFFERENT
from fdasync.ipc.shared_memory import AUX_REGION, DEVICE_REGION, HOST_REGION, Part, state_region
from fdasync_fleet.messages import encode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Sequence

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.identity import PromptHashes
    from fdasync.engine.request_state import RequestState, SampleOutput
    from fdasync.events.actions import EmitTokens
    from fdasync.events.bus import EventBus
    from fdasync.events.catalog import RequestPrepared
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync.request import GenerateRequest, Grammar
    from fdasync.result import Result
    from fdasync.runner.base import Capacity, StepOutput
    from fdasync_fleet.link.links import Links
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import Message
    from fdasync_fleet.transfer.device_blocks import BlockPuller
    from fdasync_fleet.transfer.transports import Transports

# a peer that leaves no room for so long is given up, unless its role may be silent for longer
_ROOM_S = 60.0
#: bounds of a peer's backlog; it holds short replies only, since new tokens merge in `token_streams.py`
BACKLOG_MESSAGES = 1 << 16
BACKLOG_NBYTES = 16 << 20


class _Backlog:
    """Messages that wait for room in a peer's window, in order; `over`: too many, so that the session ends."""

    __slots__ = ("messages", "nbytes", "over")

    def __init__(self) -> None:
        self.messages: deque[tuple[Message, int]] = deque()
        self.nbytes = 0
        self.over = False

    def add(self, message: Message) -> bool:
        """Add a message; False: there are too many now."""
        nbytes = len(encode(message))
        self.messages.append((message, nbytes))
        self.nbytes += nbytes
        self.over = len(self.messages) > BACKLOG_MESSAGES or self.nbytes > BACKLOG_NBYTES
        return not self.over

    def drop_first(self) -> None:
        self.nbytes -= self.messages.popleft()[1]


class Frontend(Protocol):
    """What an instance asks of the engine's frontend, whose docstrings hold (`engine/frontend.py`)."""

    async def submit(self, ask: GenerateRequest) -> RequestState: ...

    async def check_grammar(self, grammar: Grammar) -> None: ...

    def take_over(
        self, name: str, ask: GenerateRequest, given: PromptHashes, limit_s: float
    ) -> tuple[RequestState, list[RequestPrepared]]: ...

    def find(self, request_id: str) -> RequestState | None: ...

    def requests(self) -> list[RequestState]: ...

    def abort(self, request: RequestState) -> None: ...

    def result(self, request: RequestState) -> Result: ...


class OutputProcessor(Protocol):
    """What an instance asks of the engine's output stage, whose docstrings hold (`engine/output.py`)."""

    def find(self, key: int) -> tuple[RequestState, SampleOutput] | None: ...

    def requests(self) -> list[RequestState]: ...

    def emit(self, action: EmitTokens, output: StepOutput) -> None: ...


class InstanceContext:
    """See the module.

    Attributes:
        loop, bus, frontend, processor: of the engine.
        host: the host arena.
        arena: the arena of aux rows; None without aux data.
        snapshots: the host's arena of recurrent states; None for a model that has none.
        capacity, namespace: functions that return these of the weights in use.
        fail: ends the engine with an error.
        transports, links: of the instance.
        devices: what copies between devices; None: nothing does.
        draining: the instance takes no more work.
        address: where others reach the instance, once it listens.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bus: EventBus,
        frontend: Frontend,
        processor: OutputProcessor,
        host: HostArena,
        arena: AuxArena | None,
        snapshots: HostArena | None,
        capacity: Callable[[], Capacity],
        namespace: Callable[[], bytes],
        fail: Callable[[BaseException], None],
        transports: Transports,
        links: Links,
    ) -> None:
        self.loop = loop
        self.bus = bus
        self.frontend = frontend
        self.processor = processor
        self.host = host
        self.arena = arena
        self.snapshots = snapshots
        self.capacity = capacity
        self.namespace = namespace
        self.transports = transports
        self.links = links
        self.devices: BlockPuller | None = None
        self.draining = False
        self.address = ""
        self.fail = fail
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._backlogs: dict[Peer, _Backlog] = {}

    @property
    def regions(self) -> list[SharedRegion]:
        """The shared regions, in the order by which transports number them."""
        return [arena.region for arena in (self.host, self.arena, self.snapshots) if arena is not None]

    def state_parts(self, place: int) -> tuple[Part]:
        """The part of a recurrent state in a place of the host."""
        assert self.snapshots is not None
        return (self.snapshots.payload(place, state_region(with_rows=self.arena is not None)),)

    def parts(self, host: int, slot: int) -> tuple[Part, ...]:
        """The parts of a host block's KV and of a slot's rows."""
        rows = () if self.arena is None else self.arena.parts(slot, AUX_REGION)
        return (self.host.payload(host, HOST_REGION), *rows)

    def device_parts(self, block: int, slot: int) -> tuple[Part, ...]:
        """The parts of a device block's KV and of a slot's rows."""
        nbytes = self.host.block_nbytes
        rows = () if self.arena is None else self.arena.parts(slot, AUX_REGION)
        return (Part(DEVICE_REGION, block * nbytes, nbytes), *rows)

    async def device_sums(self, blocks: Sequence[int]) -> list[int]:
        """Checksums of device blocks, which get no writer meanwhile.

        Raises RunnerError where the runner fails, InvariantBroken where processes have different bytes of a block.
        """
        assert self.devices is not None
        nbytes = self.host.block_nbytes
        sums = await self.devices.sums([Part(DEVICE_REGION, block * nbytes, nbytes) for block in blocks])
        if DIFFERENT in sums:
            raise InvariantBroken(f"block {blocks[sums.index(DIFFERENT)]} is not the same on all ranks that have it")
        return sums

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task of this instance; an error of it is a defect and fails the engine."""
        task = self.loop.create_task(work, name=f"fdasync {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def guarded(self, work: Callable[[], None]) -> Callable[..., None]:
        """A callback of the loop whose errors fail the engine; the loop itself would only log them."""

        def call(*_: object) -> None:
            try:
                work()
            except Exception as error:
                self.fail(error)

        return call

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    def tell(self, peer: Peer, message: Message) -> None:
        """Send without waiting. A message that finds no room goes into a backlog, which is sent in order as the peer
        makes room. A backlog that grows too long ends the peer's session.
        """
        backlog = self._backlogs.get(peer)
        if backlog is None:
            try:
                peer.send(message)
                return
            except PeerBusy:
                backlog = self._backlogs[peer] = _Backlog()
                self.start(self._catch_up(peer, backlog), f"backlog of {peer.name}")
            except (PeerUnreachable, PeerRefused):
                # `on_lost` ends all leases and requests of this peer
                return
        if not backlog.over and not backlog.add(message):
            problem = f"{len(backlog.messages)} messages of {backlog.nbytes} bytes wait for it, more than are kept"
            # later, since the caller is in the middle of a change to a lease or a request
            self.loop.call_soon(self.guarded(lambda: self.links.give_up(peer, problem)))

    async def _catch_up(self, peer: Peer, backlog: _Backlog) -> None:
        try:
            while backlog.messages:
                await self.say(peer, backlog.messages[0][0])
                backlog.drop_first()
        except (PeerUnreachable, PeerRefused):
            return
        finally:
            del self._backlogs[peer]

    async def say(self, peer: Peer, message: Message, payload: bytes | memoryview | None = None) -> None:
        """Send as soon as the peer has room. Raises PeerUnreachable, PeerRefused.

        Ends the session of a peer that leaves no room for long, since no message may be left out.
        """
        while True:
            try:
                peer.send(message, payload)
                return
            except PeerBusy:
                limit_s = max(_ROOM_S, 2 * self.links.config.router_lost_s if peer.role == "router" else 0.0)
                try:
                    await peer.room(limit_s)
                except DeadlineExceeded:
                    problem = f"it left no room for {limit_s:g} s"
                    self.links.give_up(peer, problem)
                    raise PeerUnreachable(peer.address or peer.name, problem) from None
