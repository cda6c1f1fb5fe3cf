"""Reads the frames that a wire brings: finds their peer and session, and delivers messages in order.

A frame that is malformed, late or unknown is counted and has no other effect. Knows no timers; changes the states of
peers through `PeerStates`. Called by `Links`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ProtocolError
from fdasync_fleet.link.handshake import hello_of
from fdasync_fleet.link.session import (
    ENVELOPE_NBYTES,
    MAX_FRAME_NBYTES,
    NOBODY,
    NUMBERS_OF,
    PAIR_NBYTES,
    PROCESS_NBYTES,
    SESSION_NBYTES,
    is_sound,
    process_of,
)
from fdasync_fleet.messages import LINK_MESSAGES, Bye, Heartbeat, Hello, Refused, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.callbacks import LinkCallbacks, PeerStates
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.session import Session
    from fdasync_fleet.link.wire import Frame, Pipe, Wire

_NO_NUMBERS = bytes(16)
_UNNUMBERED = frozenset(LINK_MESSAGES)


class Inbound:
    """See the module.

    Attributes:
        dismissed: sessions that got a Bye since the last tick since we do not know them; they get no second one.
    """

    def __init__(
        self, states: PeerStates, wire: Wire, owner: LinkCallbacks, by_pipe: dict[Pipe, Peer], time: Callable[[], float]
    ) -> None:
        self.dismissed: set[bytes] = set()
        self._states = states
        self._wire = wire
        self._owner = owner
        self._by_pipe = by_pipe
        self._time = time

    def take(self, pipe: Pipe, frames: list[Frame]) -> None:
        """Handle the frames of one send. Raises what the owner's callbacks raise."""
        peer = self._by_pipe.get(pipe)
        head = frames[0]
        # most are a single frame, which is looked at here
        if (len(frames) > 1 or not ENVELOPE_NBYTES <= len(head) <= MAX_FRAME_NBYTES) and not is_sound(frames):
            self._malformed(pipe, peer)
            return
        session = peer.session if peer is not None else None
        if peer is None or session is None or head[:PAIR_NBYTES] != session.incoming:
            self._take_foreign(pipe, peer, head)
            return
        number, ack = NUMBERS_OF(head, PAIR_NBYTES)
        session.heard = now = self._time()
        if ack >= session.base and session.acknowledged(ack, now):
            if session.has_more:
                peer.pump()
            if peer.has_waiters:
                peer.wake()
        if not number:
            if len(head) > ENVELOPE_NBYTES or not session.confirmed:
                self._take_aside(peer, session, head)
            return
        if not session.confirmed:
            self._states.up(peer, session)
        if number != session.expected:
            session.out_of_turn(number, frames, now)
            self._states.arm(session.ack_due, peer)
            return
        self._deliver(peer, session, frames, now)
        # the owner may have hung up
        while peer.session is session and (held := session.next_held()) is not None:
            self._deliver(peer, session, held, now)

    def _deliver(self, peer: Peer, session: Session, frames: list[Frame], now: float) -> None:
        try:
            message = decode(frames[0][ENVELOPE_NBYTES:])
            if type(message) in _UNNUMBERED:
                raise ProtocolError(f"a {type(message).__name__} has a number")
        except ProtocolError as error:
            # a repeat would be the same, and the sender must not take the message for delivered
            peer.counters.malformed += 1
            self._states.give_up(peer, f"a message could not be read: {error}")
            return
        if session.took(now):
            peer.send_aside()
        elif session.owed == 1:
            self._states.arm(session.ack_due, peer)
        self._owner.on_message(peer, message, frames[1] if len(frames) == 2 else None)

    def _take_aside(self, peer: Peer, session: Session, head: Frame) -> None:
        """A frame without a number, of this session."""
        message = None
        if len(head) > ENVELOPE_NBYTES:
            try:
                message = decode(head[ENVELOPE_NBYTES:])
            except ProtocolError:
                peer.counters.malformed += 1
                return
        if isinstance(message, Heartbeat) and session.confirmed:
            self._owner.on_heartbeat(peer, message)
            return
        if isinstance(message, Bye):
            self._states.lose(peer, f"it said goodbye: {message.reason}")
            return
        if isinstance(message, Refused):
            # the peer refuses our reply to its Hello
            peer.counters.refused += 1
            self._states.lose(peer, f"it refused us: {message.field}: {message.problem}")
            return
        if not session.confirmed:
            self._states.up(peer, session)
        if isinstance(message, Heartbeat):
            self._owner.on_heartbeat(peer, message)
        elif isinstance(message, Hello):
            # the peer does not know yet that its Hello arrived
            peer.send_aside()
        elif message is not None:
            peer.counters.malformed += 1

    def _take_foreign(self, pipe: Pipe, peer: Peer | None, head: Frame) -> None:
        """A frame that is not of this peer's session: a handshake or a late frame."""
        theirs, ours = bytes(head[:SESSION_NBYTES]), bytes(head[SESSION_NBYTES:PAIR_NBYTES])
        number, _ = NUMBERS_OF(head, PAIR_NBYTES)
        body = head[ENVELOPE_NBYTES:]
        try:
            if ours == NOBODY and not number and not pipe.address:
                self._take_hello(pipe, peer, theirs, body)
            elif (
                peer is not None and peer.state == "calling" and peer.session is not None and ours == peer.session.ours
            ):
                self._take_answer(peer, peer.session, theirs, body)
            else:
                self._take_late(pipe, peer, theirs, ours, body if not number else b"")
        except ProtocolError:
            self._malformed(pipe, peer)

    def _take_hello(self, pipe: Pipe, peer: Peer | None, theirs: bytes, body: Frame) -> None:
        """The first Hello of a process that dialed us, or a repeat of it."""
        if peer is not None and peer.session is not None:
            known = peer.session.theirs
            if theirs == known:
                self._states.say_hello(peer)
                return
            if theirs[:PROCESS_NBYTES] == known[:PROCESS_NBYTES] and theirs < known:
                peer.counters.late += 1
                return
        hello = hello_of(body)
        if peer is not None:
            self._states.lose(peer, "it began anew", hang_up=False)
        answer = hello if isinstance(hello, Refused) else self._owner.check(hello)
        if isinstance(answer, Refused):
            self._states.counters.refused += 1
            self._wire.send(pipe, [self._states.incarnation + theirs + _NO_NUMBERS + encode(answer)])
            self._wire.hang_up(pipe)
        elif isinstance(hello, Hello):
            self._states.greet(pipe, theirs, hello)

    def _take_answer(self, peer: Peer, session: Session, theirs: bytes, body: Frame) -> None:
        """The reply to our Hello."""
        try:
            message = decode(body)
        except ProtocolError:
            message = None
        if isinstance(message, Refused):
            self._states.refuse(peer, message)
            return
        hello = hello_of(body)
        answer = hello if isinstance(hello, Refused) else self._owner.check(hello)
        session.bind(theirs)
        if isinstance(answer, Refused):
            peer.send_aside(encode(answer))
            self._states.refuse(peer, answer)
        elif isinstance(hello, Hello):
            peer.hello, peer.incarnation = hello, process_of(theirs)
            session.heard = self._time()
            self._states.up(peer, session)
            if peer.session is session:
                # the other side waits for a frame that shows that its Hello arrived
                peer.send_aside()

    def _take_late(self, pipe: Pipe, peer: Peer | None, theirs: bytes, ours: bytes, body: Frame) -> None:
        """A frame of a session that is over, or of another process that was at our address: send Bye once."""
        (peer.counters if peer is not None else self._states.counters).late += 1
        goodbye = len(body) > 0 and isinstance(decode(body), Bye | Refused)
        if not goodbye and ours != NOBODY and theirs not in self.dismissed:
            self.dismissed.add(theirs)
            bye = encode(Bye("this session is over, or was with another process"))
            self._wire.send(pipe, [ours + theirs + _NO_NUMBERS + bye])
            # the next tick empties `dismissed`
            self._states.arm(self._time() + self._states.config.ack_s)
        if peer is None:
            self._wire.hang_up(pipe)

    def _malformed(self, pipe: Pipe, peer: Peer | None) -> None:
        (peer.counters if peer is not None else self._states.counters).malformed += 1
        if peer is None:
            self._wire.hang_up(pipe)
