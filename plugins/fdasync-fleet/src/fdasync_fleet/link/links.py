"""Links this process to other instances and routers over any wire, and delivers every message once and in order.

A cut that heals, delay, reordering, repetition and loss cost time only, as long as a peer is not silent for `lost_s` (a
router: `router_lost_s`). A session ends when the peer is silent for longer, says Bye, acknowledges nothing, sends a
message that cannot be read, or comes back as another process. Then `Links` tells its owner once, drops the messages
that were not acknowledged, and dials again if it was this side that dialed.

Heartbeats and Byes have no numbers: a Heartbeat may arrive after a later one, or after messages sent later. One timer
serves all peers. Knows no messages but Hello, Refused, Bye and Heartbeat. A router or an instance owns a `Links` and is
its `LinkCallbacks`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from fdasync.errors import BadInput, DeadlineExceeded, PeerRefused, PeerUnreachable
from fdasync.registry.mapping import check
from fdasync_fleet.link.address import absolute
from fdasync_fleet.link.inbound import Inbound
from fdasync_fleet.link.looks import Looks
from fdasync_fleet.link.peer import Peer
from fdasync_fleet.link.session import (
    NEVER,
    NOBODY,
    PROCESS_NBYTES,
    Counters,
    LinkConfig,
    Session,
    process_of,
    session_name,
)
from fdasync_fleet.messages import Bye, Hello, brief, encode

if TYPE_CHECKING:
    from fdasync_fleet.link.callbacks import LinkCallbacks
    from fdasync_fleet.link.wire import Frame, Pipe, Wire
    from fdasync_fleet.messages import Refused

_MIN_TICK_S = 0.001
_FLUSH_S = 0.05
# longest that a connection gets on which nobody replies: a process that stands still has a queue of them
_REDIAL_MOST_S = 60.0


class Links:
    """See the module. Owns the wire. Made, used and closed on one loop.

    Attributes:
        incarnation: incarnation of this process: 16 bytes, the last 4 of them zero.
        counters: counters of frames from unknown senders.
        config: times and bounds.
    """

    def __init__(
        self, wire: Wire, owner: LinkCallbacks, config: LinkConfig | None = None, *, incarnation: bytes | None = None
    ) -> None:
        """`incarnation`: at least 12 bytes that no other process has or had, the first not zero; None: random."""
        if incarnation is None:
            incarnation = b"\x01" + os.urandom(PROCESS_NBYTES - 1)
        if len(incarnation) < PROCESS_NBYTES or not incarnation[0]:
            raise BadInput("incarnation", f"{len(incarnation)} bytes, or begins with a zero", limit=PROCESS_NBYTES)
        self.incarnation = process_of(incarnation)
        self.counters = Counters()
        self.config = config or LinkConfig()
        check(self.config, root="links")
        self._wire = wire
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self._sessions = 0
        self._by_pipe: dict[Pipe, Peer] = {}
        self._dialed: dict[str, Peer] = {}
        self._by_incarnation: dict[bytes, Peer] = {}
        self._incoming = Inbound(self, wire, owner, self._by_pipe, self.time)
        self._looks = Looks()
        self._due = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._closed = self._finished = False
        wire.open(self.incarnation, self._on_frames, self._on_room)

    # -- for owners ---------------------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """All peers that we dialed, and the peers that dialed us and are up."""
        return [peer for peer in self._by_pipe.values() if peer.was_dialed or peer.is_up]

    def find(self, incarnation: bytes) -> Peer | None:
        """The peer of a process that is up; the latest, if there are several."""
        return self._by_incarnation.get(incarnation)

    def listen(self, address: str) -> str:
        """Listen at an address; returns the actual one, absolute. Raises ConfigError; see `Wire.listen`."""
        return self._wire.listen(absolute(address))

    def dial(self, address: str) -> Peer:
        """The peer at an address, dialed until it answers; the same peer if it was dialed before.

        Returns at once: wait for `ready`, or for `on_up`. A refused peer is dialed again. Raises ConfigError.
        """
        if self._closed:
            raise PeerUnreachable(address, "the links are closed")
        address = absolute(address)
        peer = self._dialed.get(address)
        if peer is None:
            pipe = self._wire.dial(address)
            peer = self._dialed[address] = self._by_pipe[pipe] = Peer(self._wire, pipe, self._loop, self.arm)
            self._call(peer)
        elif peer.state == "refused":
            self._call(peer)
        return peer

    def hang_up(self, peer: Peer, reason: str = "hung up") -> None:
        """Say Bye and forget a peer; idempotent. `on_lost` is not called; a peer that dialed us may come again."""
        if self._by_pipe.get(peer.pipe) is peer:
            self._bye(peer, reason)
            self._forget(peer, reason)

    async def aclose(self, deadline_s: float = 0.5) -> None:
        """Wait up to so many seconds until all peers have acknowledged all messages, say Bye, close the wire;
        idempotent. Callbacks go on until the Byes are sent. Cancelling ends the waiting; the wire is closed anyway.
        """
        if self._closed:
            return
        self._closed = True
        try:
            until = self.time() + deadline_s
            for peer in [peer for peer in self._by_pipe.values() if peer.unacked and peer.is_up]:
                try:
                    await peer.acknowledged(max(until - self.time(), 0.0))
                except (PeerUnreachable, DeadlineExceeded):
                    continue
        finally:
            self._finished = True
            if self._timer is not None:
                self._timer.cancel()
            anybody = any(peer.is_up for peer in self._by_pipe.values())
            for peer in list(self._by_pipe.values()):
                self._bye(peer, "closed")
                self._forget(peer, "the links are closed", hang_up=False)
            try:
                if anybody:
                    # a wire that closes drops frames that it has not sent
                    await asyncio.sleep(_FLUSH_S)
            finally:
                await self._wire.aclose()

    # -- the states of a peer -----------------------------------------------------------------

    def _call(self, peer: Peer, wait_s: float = 0.0) -> None:
        """Begin a session with the process at a peer's address."""
        now = self.time()
        peer.state, peer.refusal = "calling", None
        peer.session = self._new_session(peer, now)
        peer.hello_due, peer.hello_wait_s = now + wait_s, self.config.retry_s
        peer.redial_wait_s = 2 * self.config.lost_s
        peer.redial_due = now + peer.redial_wait_s
        self.arm(peer.hello_due, peer)

    def _new_session(self, peer: Peer, now: float) -> Session:
        self._sessions += 1
        return Session(session_name(self.incarnation, self._sessions), self.config, peer.counters, now)

    def greet(self, pipe: Pipe, theirs: bytes, hello: Hello) -> None:
        """A process that dialed us said Hello, and fits: reply, and wait for a frame that shows that the reply
        arrived."""
        now = self.time()
        peer = self._by_pipe[pipe] = Peer(self._wire, pipe, self._loop, self.arm)
        peer.state, peer.address = "greeted", hello.address
        peer.hello, peer.incarnation = hello, process_of(theirs)
        peer.session = self._new_session(peer, now)
        peer.session.bind(theirs)
        self.say_hello(peer)
        self.arm(now + self.config.lost_s, peer)

    def say_hello(self, peer: Peer) -> None:
        peer.send_aside(encode(self._owner.hello()))

    def up(self, peer: Peer, session: Session) -> None:
        """Both sides know both sessions: the peer is up."""
        now = self.time()
        session.confirmed = True
        peer.state, peer.is_up, peer.problem = "up", True, "is not up"
        peer.hello_due, peer.beat_due = NEVER, now + self.config.beat_s
        if peer.address and not peer.was_dialed:
            for other in [other for other in self._by_pipe.values() if other.is_up and not other.was_dialed]:
                if other.address == peer.address and other.incarnation != peer.incarnation:
                    self.lose(other, "another process is at its address")
        self._by_incarnation[peer.incarnation] = peer
        self.arm(peer.beat_due, peer)
        peer.wake()
        self._owner.on_up(peer)

    def lose(self, peer: Peer, problem: str, *, hang_up: bool = True) -> None:
        """End a session; dial again if we dialed. Waits for room raise.

        `hang_up`: close the pipe of a peer that dialed us.
        """
        was_up = peer.is_up
        if peer.was_dialed:
            self._end(peer, problem)
            # not at once: a peer that answers every Hello with Bye would be dialed without end
            self._call(peer, self.config.retry_s)
        else:
            self._forget(peer, problem, hang_up=hang_up)
        if was_up:
            try:
                self._owner.on_lost(peer, PeerUnreachable(peer.address or peer.name, problem))
            except Exception as error:
                # a peer that takes this one's place must come up all the same
                self._owner.on_failure(error)

    def give_up(self, peer: Peer, problem: str) -> None:
        """End a session that cannot go on: say Bye, so that the other side takes it for lost too."""
        self._bye(peer, problem)
        self.lose(peer, problem)

    def refuse(self, peer: Peer, refused: Refused) -> None:
        """A peer that we dialed does not fit; it stays refused until it is dialed again."""
        peer.counters.refused += 1
        peer.refusal = PeerRefused(peer.address, refused.field, refused.problem)
        self._end(peer, f"refused: {refused.field}: {refused.problem}")
        peer.state = "refused"
        peer.wake()

    def turn_away(self, peer: Peer, refused: Refused) -> None:
        """As `refuse`, for a peer that was up: its owner has found that it does not fit. `on_lost` is not called."""
        self._bye(peer, f"refused: {refused.field}: {refused.problem}")
        self.refuse(peer, refused)

    def _end(self, peer: Peer, problem: str) -> None:
        peer.is_up, peer.session, peer.problem = False, None, problem
        if self._by_incarnation.get(peer.incarnation) is peer:
            del self._by_incarnation[peer.incarnation]
            # two processes that dialed each other have two peers for each other
            same = (each for each in self._by_pipe.values() if each.is_up and each.incarnation == peer.incarnation)
            self._by_incarnation.update((each.incarnation, each) for each in same)
        peer.wake()

    def _forget(self, peer: Peer, problem: str, *, hang_up: bool = True) -> None:
        peer.state = "gone"
        self._end(peer, problem)
        self._by_pipe.pop(peer.pipe, None)
        if peer.was_dialed:
            self._dialed.pop(peer.address, None)
        if hang_up:
            self._wire.hang_up(peer.pipe)

    def _bye(self, peer: Peer, reason: str) -> None:
        if peer.session is not None and peer.session.theirs != NOBODY:
            peer.send_aside(encode(Bye(brief(reason))))

    # -- the wire and the clock ---------------------------------------------------------------

    def _on_frames(self, pipe: Pipe, frames: list[Frame]) -> None:
        if not self._finished:
            try:
                self._incoming.take(pipe, frames)
            except Exception as error:
                self._owner.on_failure(error)

    def _on_room(self, pipe: Pipe) -> None:
        peer = self._by_pipe.get(pipe)
        if peer is None or peer.session is None or self._finished:
            return
        peer.session.wire_full = False
        if peer.state == "calling":
            peer.hello_due = self.time()
            self.arm(peer.hello_due, peer)
        elif peer.session.owed:
            peer.send_aside()
        peer.pump()

    def arm(self, when: float, peer: Peer | None = None) -> None:
        """Have `_tick` called by then, and look after this peer."""
        if peer is not None:
            self._looks.add(when, peer)
        if when < self._due and not self._finished:
            self._due = when
            if self._timer is not None:
                self._timer.cancel()
            # bare timer: `_tick` notices that the loop stood still
            self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        now = self.time()
        late = now - self._due
        self._timer, self._due = None, NEVER
        self._incoming.dismissed.clear()
        if late > self.config.beat_s:
            # this loop stood still, and has not read the frames that came meanwhile
            for session in [peer.session for peer in self._by_pipe.values() if peer.session is not None]:
                session.heard += late
                session.cut_at = NEVER
        for peer in self._looks.take(now):
            self._look(peer, now)
        self.arm(max(self._looks.next(), now + _MIN_TICK_S))

    def _look(self, peer: Peer, now: float) -> None:
        try:
            due = self._look_after(peer, now)
        except Exception as error:
            due = now + self.config.beat_s
            self._owner.on_failure(error)
        self._looks.add(due, peer)

    def _look_after(self, peer: Peer, now: float) -> float:
        """Do what is due for a peer; returns the time of the next look."""
        session = peer.session
        if session is None or peer.state in ("refused", "gone"):
            return NEVER
        if peer.state == "calling":
            if now >= peer.redial_due:
                peer.redial_due = now + peer.redial_wait_s
                peer.redial_wait_s = min(2 * peer.redial_wait_s, _REDIAL_MOST_S)
                self._wire.redial(peer.pipe)
            if now >= peer.hello_due:
                peer.hello_due = now + peer.hello_wait_s
                peer.hello_wait_s = min(2 * peer.hello_wait_s, self.config.retry_most_s)
                self.say_hello(peer)
            return min(peer.hello_due, peer.redial_due)
        lost_due = self._lost_due(peer, session, now)
        if now >= lost_due:
            self._bye(peer, "nothing was heard from you")
            self.lose(peer, f"silent for {lost_due - session.heard:g} s")
            # the Bye has gone by then, if anything goes
            peer.redial_due = peer.hello_due
            return self._look_after(peer, now)
        if peer.state == "greeted":
            return lost_due
        if now >= peer.beat_due:
            peer.beat_due = now + self.config.beat_s
            if session.is_deaf():
                self.give_up(peer, f"acknowledged nothing for {self.config.deaf_s:g} s")
                return self._look_after(peer, now)
            peer.send_aside(encode(self._owner.beat(peer)))
        if now >= session.retry_due:
            session.retry(now)
            peer.pump()
        if now >= session.ack_due:
            peer.send_aside()
        return min(lost_due, peer.beat_due, session.retry_due, session.ack_due)

    def _lost_due(self, peer: Peer, session: Session, now: float) -> float:
        """The time at which a peer's silence has lasted too long."""
        config = self.config
        due = session.heard + config.lost_s
        if peer.state != "up" or peer.role != "router":
            return due
        # a router's loop may stand still; a closed connection shows that its process is gone
        if not peer.pipe.is_cut:
            session.cut_at = NEVER
        elif session.cut_at == NEVER:
            session.cut_at = now
        return max(due, min(session.heard + config.router_lost_s, session.cut_at + config.lost_s))
