"""Joins sequences to the tiers below the device, and moves them to new weights. Pure.

`swap_planner.py` plans copies between device and host, `store_planner.py` the dealings with the store. This module
hands their results to the sequences that wait for them, and has identities computed again under a new namespace. It
plans no step and ends no request. Called by `core.py`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fdasync.events.actions import HashAgain
from fdasync.events.catalog import (
    FetchEnded,
    Hashed,
    LateTransferEnded,
    LookedUp,
    LookupReturned,
    StoreEnded,
    SwapDone,
    WeightsChanged,
)
from fdasync.scheduler.state.sequence import Sequence, State, StoreNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.events.actions import Action
    from fdasync.events.catalog import Event
    from fdasync.scheduler.tiers.parts import Parts


class Tiers:
    """See the module.

    Attributes:
        swap_planner, store_planner: see the module.
        handlers: by type, the handlers of the events about tiers.
        hashes: actions that have identities computed again; `plan` takes them.
    """

    def __init__(self, parts: Parts) -> None:
        self.swap_planner = parts.swap_planner
        self.store_planner = parts.store_planner
        self.handlers: dict[type[Event], Callable[..., None]] = {
            LookedUp: self._on_looked_up,
            LookupReturned: self.store_planner.lookup_returned,
            FetchEnded: self._on_fetch_ended,
            StoreEnded: self.store_planner.store_ended,
            LateTransferEnded: self.store_planner.late_transfer_ended,
            Hashed: self._on_hashed,
            SwapDone: self._on_copied,
        }
        self._index = parts.index
        self._sequences = parts.sequences
        self._queues = parts.queues
        self._weights = parts.weights
        self.hashes: list[HashAgain] = []

    def plan(self, *, paused: bool, falls_asleep: bool = False) -> list[Action]:
        """The copies, questions and writes of this turn. A pause lets copies end, and begins none; before a sleep what
        shall be kept goes out."""
        actions: list[Action] = []
        if not paused or falls_asleep:
            actions += self.swap_planner.plan(ahead=not paused)
        actions += self.store_planner.plan()
        actions += self.hashes
        self.hashes.clear()
        return actions

    @property
    def is_writing(self) -> bool:
        """Blocks are on their way to the host or the store, or wait for it."""
        return bool(self.store_planner.num_writes or self.swap_planner.num_queued or self.swap_planner.num_in_flight)

    # -- waiting ------------------------------------------------------------------------------------

    def take_fresh(self, now: float) -> None:
        """Look at the sequences that came to the queue, or whose wait ended: have them hashed under the present
        namespace, then ask the store while others are served. Admission looks at them again."""
        for seq in self._queues.fresh:
            if seq.state is State.WAITING:
                if seq.indexed:
                    self.store_planner.consider(seq, now)
                elif not seq.hashing:
                    self._hash_again(seq)
        self._queues.fresh.clear()

    def leave(self, seq: Sequence) -> None:
        """The sequence ended: no copy and no store work counts for it any more, and no block is kept for it."""
        self.swap_planner.forget(seq)
        seq.store.waits_for = None
        self.store_planner.let_go(seq)

    def _on_copied(self, event: SwapDone) -> None:
        whole, ready = self.swap_planner.done(event.copy_id)
        for block in whole:
            self.store_planner.on_host(block)
        for seq in ready:
            self._queues.arrived(seq)

    def _on_looked_up(self, event: LookedUp) -> None:
        self._queues.fresh += self.store_planner.looked_up(event)

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        self._queues.fresh += self.store_planner.fetch_ended(event)

    def _hash_again(self, seq: Sequence) -> None:
        if self._index.enabled:
            seq.hashing = True
            seq.keys = []
            self.hashes.append(HashAgain(seq.key, array("i", seq.tokens).tobytes(), seq.salt))

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
        self._queues.fresh.append(seq)

    # -- cached blocks ------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Device and host forget every block (docs/design.md, rule 37). Sequences that hold blocks go on with them, and
        share none, nor any block that they fill later; a preempted sequence starts under identities that are computed
        again. Waiting sequences may have blocks brought from the store again."""
        if not self._index.enabled:
            return
        for seq in self._sequences.values():
            if seq.state is State.WAITING:
                self.store_planner.let_go(seq)
                seq.store.brought.clear()
            elif seq.state is not State.LEASED:
                seq.indexed = False
        for seq in self._queues.draining():
            seq.indexed = False
        self._index.reset()

    @property
    def is_copying(self) -> bool:
        """Copies between device and host are in flight, or wait to begin."""
        return bool(self.swap_planner.num_queued or self.swap_planner.num_in_flight)

    # -- weights ------------------------------------------------------------------------------------

    def new_weights(self, event: WeightsChanged) -> None:
        """Sequences with KV on the device go on with it, unshared; all others start under the new namespace
        (docs/design.md, rule 10). No step is in flight.
        """
        self.store_planner.new_weights(event.namespace)
        for seq in [*self._queues.loading.values(), *self._queues.loaded.values()]:
            seq.indexed = False
            self.swap_planner.forget(seq)
            self._queues.leave(seq)
        for seq in self._sequences.values():
            seq.new_weights(self._weights)
            self.store_planner.let_go(seq)
            seq.store = StoreNotes()
            seq.indexed = False
            if seq.state is State.WAITING and not seq.hashing:
                self._hash_again(seq)
        self._index.forget()
