"""Sends routers the identities of the blocks that an instance has, so that they can choose instances by prefix.

Keeps the identities that the scheduler has reported, for routers that come later. Sends changes together, several times
a second. A router whose link is full gets all identities anew once it has room. Knows no requests. Called by
`instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import PeerBusy, PeerRefused, PeerUnreachable
from fdasync.pd.messages import KvEventBatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync.events.actions import TellBlocks
    from fdasync.pd.instance.context import InstanceContext
    from fdasync.pd.link.peer import Peer

_EVERY_S = 0.05
_MAX_KEYS = 16384


class KvEvents:
    """See the module.

    Args:
        version: returns the label of the weights in use, and its order.
    """

    def __init__(self, context: InstanceContext, version: Callable[[], tuple[str, int]]) -> None:
        self._context = context
        self._version = version
        self._namespace = context.namespace()
        self._told = version()
        self._known: dict[bytes, None] = {}
        self._changes: dict[bytes, bool] = {}
        self._peers: dict[Peer, bool] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: Peer) -> None:
        """A new router: it gets all identities."""
        self._peers[peer] = True
        self._arm()

    def remove(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def tell(self, action: TellBlocks) -> None:
        """The scheduler reports blocks that it gained and lost."""
        self._renew()
        for key in action.added:
            self._known[key] = None
            self._changes[key] = True
        for key in action.removed:
            self._known.pop(key, None)
            self._changes[key] = False
        self._arm()

    def announce(self) -> None:
        """The weights or their label have changed: tell routers, even if no block did."""
        self._renew()
        self._arm()

    def _renew(self) -> None:
        namespace = self._context.namespace()
        if namespace != self._namespace:
            # identities under other weights cannot match
            self._namespace = namespace
            self._known.clear()
            self._changes.clear()
            for peer in self._peers:
                self._peers[peer] = True

    def _arm(self) -> None:
        if self._timer is None and self._peers:
            # bare timer: a pause between two messages
            self._timer = self._context.loop.call_later(_EVERY_S, self._context.guarded(self._send))

    def _send(self) -> None:
        self._timer = None
        self._renew()
        added = tuple([key for key, here in self._changes.items() if here])
        removed = tuple([key for key, here in self._changes.items() if not here])
        self._changes.clear()
        again = False
        before, self._told = self._told, self._version()
        num_items = max(len(added), len(removed), int(before != self._told))
        for peer, anew in list(self._peers.items()):
            try:
                if anew:
                    self._all(peer)
                else:
                    for first in range(0, num_items, _MAX_KEYS):
                        last = first + _MAX_KEYS
                        peer.send(self._batch(added[first:last], removed[first:last]))
                self._peers[peer] = False
            except PeerBusy:
                self._peers[peer] = again = True
            except (PeerUnreachable, PeerRefused):
                self.remove(peer)
        if again:
            self._arm()

    def _batch(self, added: tuple[bytes, ...], removed: tuple[bytes, ...] = (), *, reset: bool = False) -> KvEventBatch:
        version, order = self._told
        return KvEventBatch(self._namespace, version, reset, added, removed, order)

    def _all(self, peer: Peer) -> None:
        keys = list(self._known)
        for first in range(0, max(len(keys), 1), _MAX_KEYS):
            some = tuple(keys[first : first + _MAX_KEYS])
            peer.send(self._batch(some, reset=not first))
