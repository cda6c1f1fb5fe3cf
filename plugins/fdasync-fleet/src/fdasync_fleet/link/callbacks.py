"""Defines the callbacks of links: a contract. Instances and routers implement `LinkCallbacks`, `Links` calls it.

`Links` implements `PeerStates`, `inbound.py` calls it. Knows no wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fdasync.errors import PeerUnreachable
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.session import Counters, LinkConfig, Session
    from fdasync_fleet.link.wire import Frame, Pipe
    from fdasync_fleet.messages import Heartbeat, Hello, Message, Refused


class LinkCallbacks(Protocol):
    """The owner of a `Links`. `Links` calls it from the loop, never from within a call of `Links` or `Peer`.

    An exception of one of these is a defect of the owner: `Links` passes it to `on_failure` and goes on.
    """

    def hello(self) -> Hello:
        """The handshake of this process, now."""
        ...

    def check(self, hello: Hello) -> Refused | None:
        """Compare a peer's handshake with ours; `Links` has compared the protocol's version already."""
        ...

    def beat(self, peer: Peer) -> Heartbeat:
        """The next heartbeat for a peer."""
        ...

    def on_up(self, peer: Peer) -> None:
        """A peer is up: it can be sent messages from now on."""
        ...

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        """A peer's next message. The payload belongs to the callee."""
        ...

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        """A peer's heartbeat; it may overtake messages."""
        ...

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        """A peer is lost: once for each `on_up`, except when the owner hangs up or closes. Messages that it has not
        acknowledged may not have arrived."""
        ...

    def on_failure(self, error: Exception) -> None:
        """A defect of the owner or of the links."""
        ...


class PeerStates(Protocol):
    """The changes of peers' states that arriving frames cause.

    Attributes:
        incarnation: incarnation of this process.
        counters: counters of frames from unknown senders.
        config: times and bounds.
    """

    incarnation: bytes
    counters: Counters
    config: LinkConfig

    def arm(self, when: float, peer: Peer | None = None) -> None:
        """Look after a peer at this time, by the loop's clock; None: after none, but forget whom a Bye was sent."""
        ...

    def greet(self, pipe: Pipe, theirs: bytes, hello: Hello) -> None:
        """A process dialed us, and fits: make its peer and send our Hello."""
        ...

    def say_hello(self, peer: Peer) -> None:
        """Send our Hello."""
        ...

    def up(self, peer: Peer, session: Session) -> None:
        """A peer has shown that it knows both sessions."""
        ...

    def refuse(self, peer: Peer, refused: Refused) -> None:
        """A peer that we dialed does not fit."""
        ...

    def give_up(self, peer: Peer, problem: str) -> None:
        """Send Bye to a peer that cannot be understood, and lose it."""
        ...

    def lose(self, peer: Peer, problem: str, *, hang_up: bool = True) -> None:
        """A peer's session is over."""
        ...
