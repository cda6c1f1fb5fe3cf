"""Tells routers which blocks an instance has, so that they can send requests where their prefix is.

Keeps what the scheduler told so far, for routers that come later; sends changes together, a few times a second, each
router at its own pace: one that does not keep up is told everything anew when it does. Called by `instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import PeerBusy, PeerRefused, PeerUnreachable
from fdasync.pd.messages import BlockNews

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync.events.actions import TellBlocks
    from fdasync.pd.instance.context import Site
    from fdasync.pd.link.peer import Peer

_EVERY_S = 0.05
_MAX_KEYS = 16384


class News:
    """See the module.

    Args:
        version: of the weights in use, now.
    """

    def __init__(self, site: Site, version: Callable[[], int]) -> None:
        self._site = site
        self._version = version
        self._namespace = site.namespace()
        self._known: dict[bytes, None] = {}
        self._changes: dict[bytes, bool] = {}
        self._peers: dict[Peer, bool] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: Peer) -> None:
        """A router that knows nothing yet."""
        self._peers[peer] = True
        self._arm()

    def remove(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def tell(self, action: TellBlocks) -> None:
        """The scheduler gained and lost blocks."""
        self._renew()
        for key in action.added:
            self._known[key] = None
            self._changes[key] = True
        for key in action.removed:
            self._known.pop(key, None)
            self._changes[key] = False
        self._arm()

    def announce(self) -> None:
        """The weights may be others now: routers shall know, even where no block changed."""
        self._renew()
        if any(self._peers.values()):
            self._arm()

    def _renew(self) -> None:
        namespace = self._site.namespace()
        if namespace != self._namespace:
            # new weights: nothing of before can be matched
            self._namespace = namespace
            self._known.clear()
            self._changes.clear()
            for peer in self._peers:
                self._peers[peer] = True

    def _arm(self) -> None:
        if self._timer is None and self._peers:
            # bare timer: a pause between two messages
            self._timer = self._site.loop.call_later(_EVERY_S, self._site.guarded(self._send))

    def _send(self) -> None:
        self._timer = None
        self._renew()
        added = tuple([key for key, here in self._changes.items() if here])
        removed = tuple([key for key, here in self._changes.items() if not here])
        self._changes.clear()
        again = False
        version = self._version()
        for peer, anew in list(self._peers.items()):
            try:
                if anew:
                    self._all(peer, version)
                elif added or removed:
                    for first in range(0, max(len(added), len(removed)), _MAX_KEYS):
                        last = first + _MAX_KEYS
                        news = BlockNews(self._namespace, version, False, added[first:last], removed[first:last])
                        peer.send(news)
                self._peers[peer] = False
            except PeerBusy:
                self._peers[peer] = again = True
            except (PeerUnreachable, PeerRefused):
                self.remove(peer)
        if again:
            self._arm()

    def _all(self, peer: Peer, version: int) -> None:
        keys = list(self._known)
        for first in range(0, max(len(keys), 1), _MAX_KEYS):
            some = tuple(keys[first : first + _MAX_KEYS])
            peer.send(BlockNews(self._namespace, version, not first, some, ()))
