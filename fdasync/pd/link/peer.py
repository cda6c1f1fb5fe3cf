"""Another instance or router, as its owner sees it: who it is, whether it is there, and a way to tell it things.

Knows no handshake and no timers: `links.py` moves a peer from state to state and hands it what arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable, ProtocolError
from fdasync.ipc.deadlines import Within
from fdasync.pd.link.session import NEVER, Counters, Session
from fdasync.pd.messages import MAX_PAYLOAD_NBYTES, Bye, Heartbeat, Hello, Message, Refused, Role, encode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync.pd.link.wire import Pipe, Wire

#: calling: we say Hello until it is answered; greeted: we answered a Hello, and do not know yet if that arrived;
#: up; refused: it or we said that we do not fit; gone: it is not coming back as this peer
State = Literal["calling", "greeted", "up", "refused", "gone"]
_ASIDE = (Hello, Refused, Bye, Heartbeat)


class Peer:
    """One for each address that was dialed, and one for each process that dialed us. Made by `Links`.

    A dialed one comes and goes, and may be another process each time it comes. One that dialed us comes once: if the
    same process comes again after it was lost, that is a new Peer.

    Attributes:
        address: what was dialed; of one that dialed us where it listens, "" where it does not.
        hello: its latest; None before the first.
        incarnation: of its process, 16 bytes; empty before the first Hello.
        is_up: messages can be sent.
        was_dialed: by us.
        counters: since the peer was made, over all its sessions.
    """

    def __init__(self, wire: Wire, pipe: Pipe, loop: asyncio.AbstractEventLoop, arm: Callable[[float], None]) -> None:
        self.address = pipe.address
        self.was_dialed = bool(pipe.address)
        self.hello: Hello | None = None
        self.incarnation = b""
        self.is_up = False
        self.counters = Counters()
        self._wire = wire
        self._pipe = pipe
        self._loop = loop
        self._time = loop.time
        self._arm = arm
        self._waiting: list[asyncio.Future[None]] = []
        # the rest is moved by Links
        self.state: State = "calling"
        self.session: Session | None = None
        self.refusal: PeerRefused | None = None
        self.problem = "has not answered yet"
        self.hello_due = NEVER
        self.hello_wait_s = 0.0
        self.beat_due = NEVER

    @property
    def name(self) -> str:
        """For people: from its Hello, or its address before that."""
        return self.hello.name if self.hello is not None else self.address

    @property
    def role(self) -> Role | None:
        """From its Hello; None before that."""
        return self.hello.role if self.hello is not None else None

    @property
    def unacked(self) -> int:
        """Messages that it has not acknowledged."""
        return self.session.unacked if self.session is not None else 0

    @property
    def has_room(self) -> bool:
        """A message may be sent now; False too while the peer is not up."""
        return self.session is not None and self.is_up and not self.session.is_full

    def __repr__(self) -> str:
        return f"<Peer {self.name or self.incarnation.hex()} {self.state}>"

    def send(self, message: Message, payload: bytes | bytearray | memoryview | None = None) -> None:
        """Have a message delivered once and in order, as long as the peer stays up. Never waits.

        The message is encoded here; a payload that is not `bytes` is copied. Raises PeerUnreachable while the peer is
        not up, PeerBusy while its window is full (wait for `room`), ProtocolError for what is longer than a link
        takes or is for links only (Hello, Refused, Bye, Heartbeat); in all cases nothing was sent.
        """
        session = self.session
        if session is None or not self.is_up:
            raise self._unreachable()
        if session.is_full:
            raise PeerBusy(self.address or self.name, session.unacked_nbytes)
        body = encode(message)
        if payload is not None:
            if len(payload) > MAX_PAYLOAD_NBYTES:
                raise ProtocolError(f"a payload of {len(payload)} bytes is above the limit of {MAX_PAYLOAD_NBYTES}")
            payload = bytes(payload)
        if isinstance(message, _ASIDE):
            raise ProtocolError(f"a {type(message).__name__} is sent by links themselves")
        if session.add(body, payload, self._time()):
            self.pump()
        if session.unacked == 1:
            self._arm(session.retry_due)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the peer is up.

        Raises PeerRefused if the two do not fit, PeerUnreachable if it will not come (hung up, closed, or one that
        dialed us and is gone), DeadlineExceeded after so many seconds. Cancelling stops the waiting only.
        """
        await self._until(lambda: self.is_up, f"connecting to {self.address or self.name}", deadline_s)

    async def room(self, deadline_s: float) -> None:
        """Wait until the window has room for a message of any size; somebody else may be faster to use it.

        Raises PeerUnreachable if the peer is lost meanwhile, and as `ready` does.
        """
        what = f"waiting for room in the window of {self.address or self.name}"
        await self._until(lambda: not self._up_session().is_full, what, deadline_s)

    async def acknowledged(self, deadline_s: float) -> None:
        """Wait until everything sent so far, and meanwhile, has been acknowledged. Raises as `room` does."""
        what = f"waiting for acknowledgement by {self.address or self.name}"
        await self._until(lambda: not self._up_session().unacked, what, deadline_s)

    # -- for Links ----------------------------------------------------------------------------

    @property
    def pipe(self) -> Pipe:
        return self._pipe

    def pump(self) -> None:
        """Give the wire what it takes."""
        session, send, pipe = self.session, self._wire.send, self._pipe
        if session is None:
            return
        while (frames := session.next_frames()) is not None:
            if not send(pipe, frames):
                session.wire_full = True
                return
            session.went()

    def send_aside(self, body: bytes = b"") -> None:
        """Send an acknowledgement, and a message that may be lost."""
        session = self.session
        if session is not None:
            owed = session.owed
            if not self._wire.send(self._pipe, [session.bare(body)]):
                session.wire_full = True
                # said again when there is room
                session.owed = owed

    def wake(self) -> None:
        """Something changed: those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    # -- waits --------------------------------------------------------------------------------

    def _unreachable(self) -> PeerUnreachable | PeerRefused:
        return self.refusal or PeerUnreachable(self.address or self.name, self.problem)

    def _up_session(self) -> Session:
        if self.session is None or not self.is_up:
            raise self._unreachable()
        return self.session

    async def _until(self, met: Callable[[], bool], what: str, deadline_s: float) -> None:
        try:
            async with Within(deadline_s):
                while not met():
                    if self.state in ("refused", "gone"):
                        raise self._unreachable()
                    future: asyncio.Future[None] = self._loop.create_future()
                    self._waiting.append(future)
                    await future
        except TimeoutError:
            raise DeadlineExceeded(what, deadline_s) from None
