"""Sends routers the identities of the blocks that an instance has, so that they can choose instances by prefix.

Keeps the identities that the scheduler has reported, for routers that come later. Sends changes together, several times
a second. A router that comes is caught up page by page: the next page goes when the router's side of the link has
acknowledged the last one, so that a router that hundreds of instances tell of all their blocks at once has a page of
each before it, and not all. Changes go to it meanwhile. A router whose link is full is caught up anew once it has room.
Knows no requests. Called by `instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import PeerBusy, PeerRefused, PeerUnreachable
from fdasync_fleet.messages import KvEventBatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync.events.actions import TellBlocks
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.link.peer import Peer

_EVERY_S = 0.05
# identities of one message; a router takes some 2 ms for them
_PAGE_KEYS = 1024


class _Reader:
    """A router.

    Attributes:
        anew: it must be told all identities.
        left: identities that it has not been told yet, the next ones last; empty once it has caught up.
        page: number of the message that had the last page, as the link counts them.
    """

    __slots__ = ("anew", "left", "page")

    def __init__(self) -> None:
        self.anew = True
        self.left: list[bytes] = []
        self.page = 0

    @property
    def is_behind(self) -> bool:
        return self.anew or bool(self.left)


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
        self._peers: dict[Peer, _Reader] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: Peer) -> None:
        """A new router: it gets all identities."""
        self._peers[peer] = _Reader()
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
            for reader in self._peers.values():
                reader.anew = True

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
        before, self._told = self._told, self._version()
        num_items = max(len(added), len(removed), int(before != self._told))
        for peer, reader in list(self._peers.items()):
            try:
                if not reader.anew:
                    for first in range(0, num_items, _PAGE_KEYS):
                        last = first + _PAGE_KEYS
                        peer.send(self._batch(added[first:last], removed[first:last]))
                if reader.is_behind:
                    self._catch_up(peer, reader)
            except PeerBusy:
                reader.anew = True
            except (PeerUnreachable, PeerRefused):
                self.remove(peer)
        if any(reader.is_behind for reader in self._peers.values()):
            self._arm()

    def _catch_up(self, peer: Peer, reader: _Reader) -> None:
        """Send the next page, if the last one has arrived."""
        if peer.counters.sent - peer.unacked < reader.page:
            return
        reset, left = reader.anew, list(reversed(self._known)) if reader.anew else reader.left
        # what has gone since is not told; the message that says so went before
        page = tuple([key for key in reversed(left[-_PAGE_KEYS:]) if key in self._known])
        peer.send(self._batch(page, reset=reset))
        reader.anew, reader.left, reader.page = False, left[:-_PAGE_KEYS], peer.counters.sent

    def _batch(self, added: tuple[bytes, ...], removed: tuple[bytes, ...] = (), *, reset: bool = False) -> KvEventBatch:
        version, order = self._told
        return KvEventBatch(
            namespace=self._namespace,
            weight_version=version,
            reset=reset,
            added=added,
            removed=removed,
            weight_order=order,
        )
