"""What links ask and tell whoever owns them: a contract. Implemented by instances and by routers; called by `Links`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fdasync.errors import PeerUnreachable
    from fdasync.pd.messages import Heartbeat, Hello, Message, Refused
    from fdasync.pd.peer import Peer
    from fdasync.pd.wire import Frame


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
