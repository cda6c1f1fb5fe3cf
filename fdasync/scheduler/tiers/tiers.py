"""What happens to blocks and waiting sequences below the device, and when the weights change. Pure.

Joins the copies between device and host (`swap_planner.py`) and the dealings with the store (`store_planner.py`) to the
sequences: who is written, who has what it waited for, who must be hashed again under a namespace that is new. Called by
`core.py`; plans no step and ends no request."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fdasync.events.actions import HashAgain
from fdasync.events.catalog import (
    FetchEnded,
    Hashed,
    LeaseReturned,
    LookedUp,
    LookupReturned,
    StoreEnded,
    WeightsChanged,
)
from fdasync.scheduler.state.sequence import Sequence, State, StoreNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.prefix import PrefixIndex
    from fdasync.events.actions import Action
    from fdasync.events.catalog import Event
    from fdasync.scheduler.state.queues import Roster
    from fdasync.scheduler.state.weights import Weights
    from fdasync.scheduler.tiers.store_planner import Storer
    from fdasync.scheduler.tiers.swap_planner import Copier


class Tiers:
    """See the module.

    Args:
        sequences: the live ones by key; owned by the scheduler.

    Attributes:
        handlers: of the events that belong here.
    """

    def __init__(
        self,
        index: PrefixIndex,
        sequences: dict[int, Sequence],
        roster: Roster,
        copier: Copier,
        storer: Storer,
        weights: Weights,
    ) -> None:
        self.copier = copier
        self.storer = storer
        self.handlers: dict[type[Event], Callable[..., None]] = {
            LookedUp: self._on_looked_up,
            LookupReturned: self.storer.lookup_returned,
            FetchEnded: self._on_fetch_ended,
            StoreEnded: self.storer.store_ended,
            LeaseReturned: self.storer.lease_returned,
            Hashed: self._on_hashed,
        }
        self._index = index
        self._sequences = sequences
        self._roster = roster
        self._weights = weights
        self._hashes: list[HashAgain] = []

    def plan(self, *, paused: bool) -> list[Action]:
        """What to copy, ask and write now. A pause lets copies end, and begins none."""
        actions: list[Action] = []
        if not paused:
            actions += self.copier.plan()
        actions += self.storer.plan()
        actions += self._hashes
        self._hashes.clear()
        return actions

    @property
    def is_writing(self) -> bool:
        """Blocks are on their way to the host or the store, or wait for it."""
        return bool(self.storer.num_writes or self.copier.num_queued or self.copier.num_in_flight)

    # -- waiting ------------------------------------------------------------------------------------

    def enter(self, seq: Sequence, namespace: bytes, now: float) -> None:
        """A sequence came in, hashed under this namespace."""
        if namespace != self._weights.namespace:
            self._hash_again(seq)
        elif self._index.enabled:
            self.storer.consider(seq, now)

    def take_requeued(self, now: float) -> None:
        """Those who were preempted are matched again, under the namespace of now."""
        for seq in self._roster.requeued:
            if seq.state is State.WAITING:
                if not seq.indexed:
                    self._hash_again(seq)
                elif self._index.enabled:
                    self.storer.consider(seq, now)
        self._roster.requeued.clear()

    def leave(self, seq: Sequence) -> None:
        """It ended: it waits for nothing, and nothing is kept for it."""
        seq.store.waits_for = None
        self.storer.let_go(seq)

    def copied(self, copy_id: int) -> None:
        """A copy between device and host ended."""
        for seq in self.copier.done(copy_id):
            self._roster.arrived(seq)

    def _on_looked_up(self, event: LookedUp) -> None:
        for seq in self.storer.looked_up(event):
            self.storer.consider(seq, event.at)

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        for seq in self.storer.fetch_ended(event):
            self.storer.consider(seq, event.at)

    def _hash_again(self, seq: Sequence) -> None:
        if self._index.enabled:
            seq.hashing = True
            seq.keys = []
            self._hashes.append(HashAgain(seq.key, array("i", seq.tokens).tobytes(), seq.salt))

    def _on_hashed(self, event: Hashed) -> None:
        seq = self._sequences.get(event.key)
        if seq is None or not seq.hashing:
            return
        if event.namespace != self._weights.namespace:
            self._hash_again(seq)
            return
        seq.hashing = False
        seq.indexed = True
        seq.root = event.root
        seq.keys = list(event.block_keys)
        self.storer.consider(seq, event.at)

    # -- weights ------------------------------------------------------------------------------------

    def new_weights(self, event: WeightsChanged) -> None:
        """DECISIONS 10: who has KV on the device goes on with it, unshared; everyone else starts under the new root.

        No step is in flight.
        """
        self.storer.new_weights(event.namespace)
        for seq in [*self._roster.loading.values(), *self._roster.loaded.values()]:
            seq.indexed = False
            self._roster.leave(seq)
        for seq in self._sequences.values():
            seq.new_weights(event.version)
            self.storer.let_go(seq)
            seq.store = StoreNotes()
            seq.indexed = False
            if seq.state is State.WAITING and not seq.hashing and seq not in self._roster.requeued:
                self._hash_again(seq)
        self._index.forget()
