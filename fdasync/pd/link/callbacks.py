"""What links ask and tell whoever owns them: a contract. Implemented by instances and by routers; called by `Links`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fdasync.errors import PeerUnreachable
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.link.session import Counters, LinkConfig, Session
    from fdasync.pd.link.wire import Frame, Pipe
    from fdasync.pd.messages import Heartbeat, Hello, Message, Refused


class LinkOwner(Protocol):
    """Called from the loop, never from within a call of `Links` or `Peer`.

    What one of these raises is a defect of the owner: it is given to `on_failure`, and the links go on.
    """

    def hello(self) -> Hello:
        """Who we are, now."""
        ...

    def check(self, hello: Hello) -> Refused | None:
        """Whether we fit; the protocol's version has been compared already."""
        ...

    def beat(self, peer: Peer) -> Heartbeat:
        """What to tell a peer with the next heartbeat."""
        ...

    def on_up(self, peer: Peer) -> None:
        """A peer that may be sent messages from now on."""
        ...

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        """The next message of a peer. The payload is the callee's."""
        ...

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None: ...

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        """Once for each `on_up`, except when we hang up or close: what was not acknowledged may not have arrived."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Something that must not happen."""
        ...


class PeerStates(Protocol):
    """What frames that arrive do to peers (`inbound.py`). Implemented by `Links`.

    Attributes:
        incarnation: of this process.
        counters: of what came from nobody that we know.
    """

    incarnation: bytes
    counters: Counters
    config: LinkConfig

    def arm(self, due: float) -> None:
        """Look at all peers then, by the loop's clock."""
        ...

    def greet(self, pipe: Pipe, theirs: bytes, hello: Hello) -> None:
        """Somebody who dialed us, and fits."""
        ...

    def say_hello(self, peer: Peer) -> None: ...

    def up(self, peer: Peer, session: Session) -> None:
        """It answers in this session."""
        ...

    def refuse(self, peer: Peer, refused: Refused) -> None:
        """One that we dialed does not fit."""
        ...

    def give_up(self, peer: Peer, problem: str) -> None:
        """Say Bye to one that cannot be understood, and lose it."""
        ...

    def lose(self, peer: Peer, problem: str, *, hang_up: bool = True) -> None:
        """Its session is over."""
        ...
