"""What the services of one instance share: its engine's parts, its links, its transports. Made by `instance.py`.

Decides nothing, and keeps no state of its own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable
from fdasync.ipc.shared_memory import AUX_REGION, HOST_REGION
from fdasync.pd.messages import encode
from fdasync.pd.transfer.transports import Carriers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.engine.frontend import Door
    from fdasync.engine.output import OutputHub
    from fdasync.events.bus import EventBus
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.link.links import Links
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.messages import Message
    from fdasync.runner.base import Capacity

# a peer that leaves no room for so long is as good as gone, unless it may be silent for longer
_ROOM_S = 60.0
#: of what waits for one peer to keep up; it holds small answers only: tokens merge where they come from
BACKLOG_MESSAGES = 1 << 16
BACKLOG_NBYTES = 16 << 20


class _Backlog:
    """What waits for room in a peer's window, in order; `over`: it became too much, and the session ends."""

    __slots__ = ("messages", "nbytes", "over")

    def __init__(self) -> None:
        self.messages: deque[tuple[Message, int]] = deque()
        self.nbytes = 0
        self.over = False

    def add(self, message: Message) -> bool:
        """Keep it; False: that was too much."""
        nbytes = len(encode(message))
        self.messages.append((message, nbytes))
        self.nbytes += nbytes
        self.over = len(self.messages) > BACKLOG_MESSAGES or self.nbytes > BACKLOG_NBYTES
        return not self.over

    def drop_first(self) -> None:
        self.nbytes -= self.messages.popleft()[1]


class Site:
    """See the module.

    Attributes:
        capacity, namespace: of the weights in use, now.
        draining: the instance takes no more work.
    """

    links: Links

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bus: EventBus,
        door: Door,
        hub: OutputHub,
        host: HostArena,
        arena: AuxArena | None,
        capacity: Callable[[], Capacity],
        namespace: Callable[[], bytes],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.loop = loop
        self.bus = bus
        self.door = door
        self.hub = hub
        self.host = host
        self.arena = arena
        self.capacity = capacity
        self.namespace = namespace
        self.carriers = Carriers(())
        self.draining = False
        self._fail = fail
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._backlogs: dict[Peer, _Backlog] = {}

    @property
    def regions(self) -> list[SharedRegion]:
        """As transports number them."""
        return [self.host.region] + ([self.arena.region] if self.arena is not None else [])

    def parts(self, host: int, slot: int) -> tuple[Part, ...]:
        """Where a host block's KV and a slot's rows lie."""
        rows = () if self.arena is None else self.arena.parts(slot, AUX_REGION)
        return (self.host.payload(host, HOST_REGION), *rows)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of this instance; what it raises is a defect and ends the engine."""
        task = self.loop.create_task(work, name=f"fdasync {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def guarded(self, work: Callable[[], None]) -> Callable[..., None]:
        """A callback of the loop whose errors end the engine; the loop itself would only log them."""

        def call(*_: object) -> None:
            try:
                work()
            except Exception as error:
                self._fail(error)

        return call

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    def tell(self, peer: Peer, message: Message) -> None:
        """Send without waiting; what does not go now goes in order as soon as the peer keeps up, while it is up.

        The session of a peer for which too much waits ends: it is lost, and hears so.
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
                # its loss ends everything with it
                return
        if not backlog.over and not backlog.add(message):
            problem = f"{len(backlog.messages)} messages of {backlog.nbytes} bytes wait for it, more than are kept"
            # not from within what it does to a lease or a request
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
        """Send as soon as the peer keeps up. Raises PeerUnreachable, PeerRefused.

        The session of a peer that leaves no room for long ends: nothing of it is left out.
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
