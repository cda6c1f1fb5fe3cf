"""A `Peer` stands for another instance or router: its handshake, its state, and the sending of messages to it.

Knows no handshake and no timers: `links.py` moves a peer from state to state, `inbound.py` reads its frames. Called by
routers and instances to send messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable, ProtocolError
from fdasync.ipc.deadlines import Within
from fdasync_fleet.link.session import NEVER, Counters, Session
from fdasync_fleet.messages import LINK_MESSAGES, MAX_PAYLOAD_NBYTES, Hello, Message, encode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync_fleet.fields import Role
    from fdasync_fleet.link.wire import Pipe, Wire

#: calling: we repeat our Hello until the peer replies; greeted: we replied to its Hello, and do not know yet whether
#: the reply arrived; up; refused: one side found that the two do not fit; gone: this peer never comes back
State = Literal["calling", "greeted", "up", "refused", "gone"]


class Peer:
    """See the module. `Links` makes a peer for each address that we dial, and for each process that dials us.

    A peer that we dialed comes and goes, and may be another process each time. A peer that dialed us comes once: if
    its process comes again after it was lost, that is a new `Peer`.

    Attributes:
        address: the address that we dialed; for a peer that dialed us the address at which it listens, or "".
        hello: its latest handshake; None before the first.
        incarnation: incarnation of its process, 16 bytes; empty before the first Hello.
        is_up: messages can be sent.
        was_dialed: we dialed it.
        counters: counters since the peer was made, over all its sessions.
        state: its state; `Links` alone sets this and the attributes below.
        session: the session with it; None while it is refused or gone.
        refusal: why it is refused.
        problem: why it is not up.
        hello_due, hello_wait_s: time of the next Hello, and the pause after it.
        redial_due, redial_wait_s: while it does not reply: time at which its connection is given up, and the time that
            the next one gets.
        beat_due: time of the next heartbeat.
        look_due: time at which `Links` looks after it, at the latest.
    """

    def __init__(
        self, wire: Wire, pipe: Pipe, loop: asyncio.AbstractEventLoop, arm: Callable[[float, Peer], None]
    ) -> None:
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

        self.state: State = "calling"
        self.session: Session | None = None
        self.refusal: PeerRefused | None = None
        self.problem = "has not answered yet"
        self.hello_due = NEVER
        self.hello_wait_s = 0.0
        self.redial_due = NEVER
        self.redial_wait_s = 0.0
        self.beat_due = NEVER
        self.look_due = NEVER

    @property
    def name(self) -> str:
        """The name in its Hello, for people; before the first its address."""
        return self.hello.name if self.hello is not None else self.address

    @property
    def role(self) -> Role | None:
        """The role in its Hello; None before the first."""
        return self.hello.role if self.hello is not None else None

    @property
    def is_absent(self) -> bool:
        """Whether it is certain that no process listens at its address now."""
        return self._wire.is_absent(self.address)

    @property
    def unacked(self) -> int:
        """Number of messages that it has not acknowledged."""
        return self.session.unacked if self.session is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent now; False while the peer is not up."""
        return self.session is not None and self.is_up and not self.session.is_full

    def __repr__(self) -> str:
        return f"<Peer {self.name or self.incarnation.hex()} {self.state}>"

    def send(self, message: Message, payload: bytes | bytearray | memoryview | None = None) -> None:
        """Send a message. It is delivered once and in order, as long as the peer stays up. Never waits.

        The message is encoded here; a payload that is not `bytes` is copied. Raises PeerUnreachable while the peer is
        not up, PeerBusy while its window is full (wait for `room`), ProtocolError for a message or payload that is too
        long and for `LINK_MESSAGES`; then nothing was sent.
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
        if isinstance(message, LINK_MESSAGES):
            raise ProtocolError(f"a {type(message).__name__} is sent by links themselves")
        if session.add(body, payload, self._time()):
            self.pump()
        if session.unacked == 1:
            self._arm(session.retry_due, self)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the peer is up.

        Raises PeerRefused if the two do not fit, PeerUnreachable if the peer is gone for good (hung up, closed, or lost
        after it dialed us), DeadlineExceeded after so many seconds. Cancelling stops the waiting only.
        """
        await self._until(lambda: self.is_up, f"connecting to {self.address or self.name}", deadline_s)

    async def room(self, deadline_s: float) -> None:
        """Wait until the window has room for a message of any size; another task may use the room first.

        Raises PeerUnreachable if the peer is lost meanwhile, and the errors of `ready`.
        """
        what = f"waiting for room in the window of {self.address or self.name}"
        await self._until(lambda: not self._up_session().is_full, what, deadline_s)

    async def acknowledged(self, deadline_s: float) -> None:
        """Wait until the peer has acknowledged all messages, also those sent meanwhile. Raises the errors of `room`."""
        what = f"waiting for acknowledgement by {self.address or self.name}"
        await self._until(lambda: not self._up_session().unacked, what, deadline_s)

    # -- for Links ----------------------------------------------------------------------------

    @property
    def pipe(self) -> Pipe:
        return self._pipe

    def pump(self) -> None:
        """Give the wire as many frames as it takes."""
        session, send, pipe = self.session, self._wire.send, self._pipe
        if session is None:
            return
        while (frames := session.next_frames()) is not None:
            if not send(pipe, frames):
                session.wire_full = True
                return
            session.went()

    def send_aside(self, body: bytes = b"") -> None:
        """Send an acknowledgement, with a message that may be lost."""
        session = self.session
        if session is not None:
            owed = session.owed
            if not self._wire.send(self._pipe, [session.bare(body)]):
                session.wire_full = True
                # sent again when the wire has room
                session.owed = owed

    def wake(self) -> None:
        """The peer's state has changed: waits check their conditions again."""
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
