"""What happens to blocks and waiting sequences below the device, and when the weights change. Pure.

Joins the copies between device and host (`copier.py`) and the dealings with the store (`storer.py`) to the sequences:
who is written, who has what it waited for, who must be hashed again under a namespace that is new. Called by `core.py`;
plans no step and ends no request.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fdasync.actions import HashAgain
from fdasync.events.catalog import (
    FetchEnded,
    Hashed,
    LeaseReturned,
    LookedUp,
    LookupReturned,
    StoreEnded,
    SwapDone,
    WeightsChanged,
)
from fdasync.scheduler.copier import Copier
from fdasync.scheduler.sequence import Sequence, State, StoreNotes
from fdasync.scheduler.storer import Storer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.actions import Action
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.events.catalog import Event
    from fdasync.scheduler.borrower import Borrower
    from fdasync.scheduler.config import SchedulerConfig
    from fdasync.scheduler.lender import Lender
    from fdasync.scheduler.roster import Roster


class Tiers:
    """See the module.

    Args:
        sequences: the live ones by key; owned by the scheduler.

    Attributes:
        roster, borrower, lender: set by the scheduler, which makes them.
        namespace, version: of the weights in use.
        writes_through: sealed blocks may have to be written.
        handlers: of the events that belong here.
    """

    roster: Roster
    borrower: Borrower
    lender: Lender

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, sequences: dict[int, Sequence]) -> None:
        self.storer = Storer(config, index, lambda block: self.copier.keep(block))
        self.copier = Copier(config, index, self.storer.on_host)
        self.namespace = config.namespace
        self.version = config.weight_version
        self.writes_through = config.store and config.write_through != "off"
        self.handlers: dict[type[Event], Callable[..., None]] = {
            SwapDone: self._on_swap_done,
            LookedUp: self._on_looked_up,
            LookupReturned: self.storer.lookup_returned,
            FetchEnded: self._on_fetch_ended,
            StoreEnded: self.storer.store_ended,
            LeaseReturned: self.storer.lease_returned,
            Hashed: self._on_hashed,
        }
        self._config = config
        self._index = index
        self._sequences = sequences
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

    # -- writing ------------------------------------------------------------------------------------

    def write_through(self, seq: Sequence, number: int) -> None:
        """A block was sealed: shall the store have it?"""
        block = seq.blocks[number]
        prompt = (number + 1) * self._config.block_tokens <= seq.prompt_len
        if block.key is not None and (prompt or self._config.write_through == "all"):
            self.storer.chains.want(block, seq.keys[number - 1] if number else b"")

    def write_back(self, seq: Sequence) -> None:
        """A preempted sequence gives its blocks up: what is sealed goes to the host, and from there to the store."""
        if not self._config.write_back:
            return
        for number, block in enumerate(seq.blocks):
            if not block.sealed or block.key is None:
                continue
            if self._config.store and not block.stored and not block.wanted:
                self.storer.chains.want(block, seq.keys[number - 1] if number else b"")
            else:
                self.copier.keep(block)

    # -- waiting ------------------------------------------------------------------------------------

    def enter(self, seq: Sequence, namespace: bytes, now: float) -> None:
        """A sequence came in, hashed under this namespace."""
        if namespace != self.namespace:
            self._hash_again(seq)
        elif self._index.enabled:
            self.storer.consider(seq, now)

    def take_requeued(self, now: float) -> None:
        """Those who were preempted are matched again, under the namespace of now."""
        for seq in self.roster.requeued:
            if seq.state is State.WAITING:
                if not seq.indexed:
                    self._hash_again(seq)
                elif self._index.enabled:
                    self.storer.consider(seq, now)
        self.roster.requeued.clear()

    def leave(self, seq: Sequence) -> None:
        """It ended: it waits for nothing, and nothing is kept for it."""
        seq.store.waits_for = None
        self.storer.let_go(seq)
        if seq.errand is not None:
            self.borrower.leave(seq)
        if seq.lease >= 0:
            self.lender.leave(seq, seq.lease)

    def _on_swap_done(self, event: SwapDone) -> None:
        for seq in self.copier.done(event.copy_id):
            self.roster.arrived(seq)
        self.lender.copied(event.copy_id)

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
        if event.namespace != self.namespace:
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
        self.namespace, self.version = event.namespace, event.version
        for seq in self.borrower.new_weights(event.at):
            self.roster.leave(seq)
        self.lender.new_weights()
        self.storer.new_weights(event.namespace)
        for seq in [*self.roster.loading.values(), *self.roster.loaded.values()]:
            seq.indexed = False
            self.roster.leave(seq)
        for seq in self._sequences.values():
            seq.new_weights(event.version)
            self.storer.let_go(seq)
            seq.store = StoreNotes()
            seq.indexed = False
            if seq.state is State.WAITING and not seq.hashing and seq not in self.roster.requeued:
                self._hash_again(seq)
        self._index.forget()
