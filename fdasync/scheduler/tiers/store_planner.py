"""Plans the dealings with the store: which blocks are looked up, fetched and written, and how long requests wait. Pure.

A request whose prefix ends on the device and the host may find more of it in the store. The store is asked only where
reading should be faster than computing, and once for all requests that want the same blocks. A request waits no longer
than the estimate plus a tenth of the recompute time (`cost_model.py`), and is then matched again. A fetched block is a
block of the host like any other, except that it stays until the first request that waited for it is admitted. Fetches
ahead of admission are bounded by half of the host tier (docs/design.md, rule 32): beyond that requests ask in turn.

Blocks that shall be kept are written from the host in the background. No request waits for a write. `chains.py` says
which writes still make sense, and which blocks have to be written again. A transfer whose wait ended before its work
keeps its blocks until `LateTransferEnded` (docs/design.md, rule 5).

This module knows identities and blocks, no bytes and no clock but the time of events. Called by `results.py`,
`step_planner.py` and `tiers.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fdasync.errors import InvariantBroken
from fdasync.events.actions import FetchBlocks, LookUp, StoreBlocks
from fdasync.scheduler.tiers.chains import Chains
from fdasync.scheduler.tiers.cost_model import REGRET_SHARE, CostModel
from fdasync.scheduler.tiers.gaps import Gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fdasync.cache.blocks import Block, HostHold
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.catalog import FetchEnded, LateTransferEnded, LookedUp, LookupReturned, StoreEnded
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.gaps import Gap

_MAX_FETCH_BLOCKS = 512
_MAX_PUT_BLOCKS = 16
_MAX_PUTS = 4
# checks of written chains in flight, one for all chains that begin alike, and the deadline of one; no request waits
_MAX_CHECKS = 4
_CHECK_S = 10.0


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup in flight.

    Attributes:
        gap: the blocks that are looked up, as numbered in the sequence that asked first.
        keys: their identities.
        deadline: of waiting for it, by the events' clock.
        waiting: sequences that wait for it.
    """

    gap: Gap
    keys: list[bytes]
    deadline: float
    waiting: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Transfer:
    """A fetch or a write in flight, or its late rest.

    Attributes:
        keys, blocks: what it moves; a block for each identity.
        snapshots: by number of the block, the snapshots that it moves, too.
        reason: whether it fetches or writes; its blocks are held for that.
        held: numbers of the blocks that it still touches.
        epoch: of the weights that the blocks belong to.
        deadline: of waiting for a fetch, by the events' clock.
        waiting: sequences that wait for a fetch.
    """

    keys: list[bytes]
    blocks: list[Block]
    epoch: int
    reason: Literal["fetch", "write"]
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    held: list[int] = field(init=False)
    deadline: float = 0.0
    waiting: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = list(range(len(self.blocks)))

    def places(self) -> tuple[int, ...]:
        """The host's places of its snapshots, as `FetchBlocks` and `StoreBlocks` have them."""
        if not self.snapshots:
            return ()
        found = [self.snapshots.get(number) for number in range(len(self.blocks))]
        return tuple([-1 if snapshot is None else snapshot.host for snapshot in found])


class StorePlanner:
    """See the module.

    Args:
        keep: called with each block that has to come to the host before it can be written.
        keep_snapshot: likewise, with its snapshot.

    Attributes:
        enabled: there is a store; without one no method needs to be called.
        chains: what the store is believed to have.
        written, dropped: blocks that the store took, and blocks that should have been written and were not.
        fetched, late_fetched: blocks that came from the store in time, and after the wait for them had ended.
        cut_off: fetches and lookups that ended at their deadline.
        rates: estimates of how long prefill, lookups and fetches take.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        index: PrefixIndex,
        keep: Callable[[Block], None],
        keep_snapshot: Callable[[Snapshot], None],
    ) -> None:
        self._config = config
        self._index = index
        self._keep = keep
        self._keep_snapshot = keep_snapshot
        self.enabled = config.store and index.enabled
        self._gaps = Gaps(config, index)
        self.chains = Chains(config, index, self._gaps, self._send)
        self.rates = CostModel(config.prefill_tokens_per_s, config.fetch_nbytes_per_s, config.lookup_s)
        self._lookups: dict[int, _Lookup] = {}
        # of each check: the identity before the blocks that it asks about, and their identities
        self._checks: dict[int, tuple[bytes, list[bytes]]] = {}
        self._fetches: dict[int, _Transfer] = {}
        self._puts: dict[int, _Transfer] = {}
        self._late: dict[int, _Transfer] = {}
        # by identity, the lookup or fetch in flight that will answer for it
        self._asked: dict[bytes, _Lookup | _Transfer] = {}
        self._queue: deque[Block] = deque()
        self._writing: dict[Block, None] = {}
        self._asks: list[LookUp | FetchBlocks] = []
        self._next_id = 0
        self._ahead_blocks = max(config.num_host_blocks // 2, 1)
        self._held = 0
        self._epoch = 0
        self._namespace = config.namespace
        self.written = self.dropped = self.fetched = self.late_fetched = self.cut_off = 0

    @property
    def num_writes(self) -> int:
        """Blocks that are being written, or wait for it."""
        return len(self._queue) + sum(len(put.blocks) for put in self._puts.values())

    @property
    def num_waits(self) -> int:
        """Lookups and fetches that requests wait for."""
        return len(self._lookups) + len(self._fetches)

    @property
    def num_late(self) -> int:
        """Transfers whose wait ended before their work."""
        return len(self._late)

    def plan(self) -> list[LookUp | FetchBlocks | StoreBlocks]:
        """The lookups, fetches and writes of this turn."""
        actions: list[LookUp | FetchBlocks | StoreBlocks] = [*self._asks]
        self._asks.clear()
        if not self._queue:
            return actions
        # late writes count: a store that hangs gets no more than this
        late = sum(transfer.reason == "write" for transfer in self._late.values())
        while self._queue and len(self._puts) + late < _MAX_PUTS:
            put = self._next_put()
            if put is not None:
                actions.append(put)
        return actions

    def new_weights(self, namespace: bytes) -> None:
        """Lookups and transfers in flight belong to the old weights: their results are not used."""
        self._epoch += 1
        self._namespace = namespace
        self._asked.clear()

    # -- reading ------------------------------------------------------------------------------------

    def consider(self, seq: Sequence, now: float) -> bool:
        """Whether `seq`, which waits to be admitted, waits for the store first: decided here alone (docs/design.md,
        rule 31). Asks it where it pays. Called when `seq` comes to the queue (`tiers.py`), and at its admission."""
        if self.enabled and not seq.hashing and seq.store.waits_for is None:
            self._consider(seq, now)
        return seq.store.waits_for is not None

    def _consider(self, seq: Sequence, now: float) -> None:
        notes = seq.store
        size = self._config.block_tokens
        gap = self._gaps.find(seq)
        if not gap.keys or gap.keys[0] in notes.brought:
            return
        if (seq.hit_limit(size) - gap.start) * size < self._config.fetch_min_tokens:
            return
        under_way = self._asked.get(gap.keys[0])
        if under_way is not None:
            under_way.waiting.append(seq)
            notes.waits_for = under_way
            return
        if notes.regret_s is not None and notes.regret_s <= 0:
            return
        if self._ahead() >= self._ahead_blocks:
            return
        recompute_s = self.rates.recompute_s(gap.num_saved * size)
        if self.rates.lookup_s + self.rates.fetch_s(self._nbytes(gap)) >= recompute_s:
            self.rates.passed_over()
            notes.regret_s = 0.0
            return
        if notes.regret_s is None:
            notes.regret_s = REGRET_SHARE * recompute_s
        deadline = now + self.rates.lookup_s + notes.regret_s
        lookup = _Lookup(gap, gap.keys, deadline)
        number = self._take_id()
        self._lookups[number] = lookup
        lookup.waiting.append(seq)
        notes.waits_for = lookup
        for key in gap.keys:
            self._asked.setdefault(key, lookup)
        self._asks.append(LookUp(number, self._namespace, tuple(gap.keys), deadline))

    def _nbytes(self, gap: Gap) -> int:
        """What the objects of these blocks take, about."""
        states = sum(self._gaps.carries_state(number) for number in gap.numbers)
        return len(gap.keys) * self._config.block_nbytes + states * self._config.snapshot_nbytes

    def _ahead(self) -> int:
        """Blocks that were, are being, or may soon be fetched for requests that are not admitted yet."""
        asked = sum(len(lookup.keys) for lookup in self._lookups.values())
        return self._held + asked + sum(len(fetch.blocks) for fetch in self._fetches.values())

    def looked_up(self, event: LookedUp) -> list[Sequence]:
        """A lookup ended; returns the sequences that need not wait any longer."""
        check = self._checks.pop(event.lookup_id, None)
        if check is not None:
            self._checked(*check, event)
            return []
        lookup = self._lookups.pop(event.lookup_id, None)
        if lookup is None or event.count > len(lookup.keys):
            raise InvariantBroken(f"lookup {event.lookup_id} of {event.count} blocks was not in flight")
        self._forget(lookup, lookup.keys)
        # an answer after the deadline came to a loop that was held up: its time says nothing of the store
        held_up = event.answered and event.at > lookup.deadline
        over_s = 0.0 if held_up else event.seconds - self.rates.lookup_s
        if held_up:
            pass
        elif event.answered:
            self.rates.looked_up(event.seconds)
        elif event.at >= lookup.deadline:
            self.cut_off += 1
        if event.answered and event.count < len(lookup.keys):
            self.chains.broken_before(self._behind(lookup))
        waiting = self._still_waiting(lookup)
        for seq in waiting:
            if seq.store.regret_s is not None:
                seq.store.regret_s -= max(over_s, 0.0) if event.answered else seq.store.regret_s
            self._note_absence(seq, lookup.gap, event.count)
        if event.count and waiting:
            fetch = self._fetch(lookup.gap, event.count, waiting, event.at)
            if fetch is not None:
                for seq in waiting:
                    gap = self._gaps.find(seq)
                    if gap.keys and self._asked.get(gap.keys[0]) is fetch:
                        seq.store.waits_for = fetch
                        fetch.waiting.append(seq)
        return [seq for seq in waiting if seq.store.waits_for is None]

    @staticmethod
    def _behind(lookup: _Lookup) -> list[bytes]:
        """The first asking sequence's identities behind the lookup's; their blocks are here."""
        chain = lookup.waiting[0].keys
        return chain[chain.index(lookup.keys[-1]) + 1 :] if lookup.keys[-1] in chain else []

    def lookup_returned(self, event: LookupReturned) -> None:
        """A lookup was answered after its deadline: its time counts for the next estimate.

        A time longer than computing does not count: the lookup hung, and says nothing of how long lookups take.
        """
        if event.seconds < self.rates.recompute_s(event.num_keys * self._config.block_tokens):
            self.rates.looked_up(event.seconds)

    @staticmethod
    def _note_absence(seq: Sequence, gap: Gap, count: int) -> None:
        """Remember where the store's run of this sequence's blocks ends, if the lookup shows it."""
        if count < len(gap.keys):
            number, key = gap.numbers[count], gap.keys[count]
            if gap.keys[0] in seq.keys and number < len(seq.keys) and seq.keys[number] == key:
                seq.store.absent_at = number

    def _fetch(self, gap: Gap, count: int, waiting: list[Sequence], now: float) -> _Transfer | None:
        """Reserve places on the host for what is lacking here of the first `count` blocks of a gap, and fetch it."""
        wanted = self._gaps.still(gap, count)
        wanted = self._gaps.whole(wanted.leading(max(_MAX_FETCH_BLOCKS, self._gaps.least(wanted))))
        regrets = [seq.store.regret_s or 0.0 for seq in waiting]
        budget_s = max(regrets[0], 0.0)
        own_s = self._fetch_s(wanted)
        if not wanted.keys or own_s >= self.rates.recompute_s(wanted.num_saved * self._config.block_tokens):
            self._give_up(waiting)
            return None
        room = self._ahead_blocks - self._held - sum(len(fetch.blocks) for fetch in self._fetches.values())
        self._hold_hits(waiting[0], wanted)
        fetch = self._reserve(wanted.leading(max(room, self._gaps.least(wanted))))
        if fetch is None:
            self._give_up(waiting)
            return None
        number = self._take_id()
        fetch.deadline = now + own_s + budget_s
        self._fetches[number] = fetch
        for key in fetch.keys:
            self._asked[key] = fetch
        blocks = fetch.blocks
        slots = [block.slot for block in blocks if block.slot is not None]
        self._asks.append(
            FetchBlocks(
                fetch_id=number,
                namespace=self._namespace,
                keys=tuple(fetch.keys),
                host=tuple([block.host for block in blocks]),
                slots=tuple([slot.id for slot in slots]),
                generations=tuple([slot.generation for slot in slots]),
                deadline=fetch.deadline,
                snapshots_host=fetch.places(),
            )
        )
        return fetch

    def _reserve(self, wanted: Gap) -> _Transfer | None:
        """Places on the host for the leading blocks of a gap, as many as there is room for and are of use, held for a
        fetch; None: there is no room for any."""
        index = self._index
        blocks: list[Block] = []
        snapshots: dict[int, Snapshot] = {}
        for place, number in enumerate(wanted.numbers):
            if not index.make_host_room(for_fetch=True):
                break
            block = index.pool.allocate_host()
            block.hold("fetch")
            blocks.append(block)
            block.with_state = self._gaps.carries_state(number)
            if block.with_state:
                assert index.pool.snapshots is not None
                snapshot = index.pool.snapshots.receive(block)
                if snapshot is None:
                    break
                snapshots[place] = snapshot
        useful = max(snapshots, default=-1) + 1 if self._gaps.every else len(blocks)
        for block in blocks[useful:]:
            block.unhold("fetch")
            index.settle(block)
        if not useful:
            return None
        fetch = _Transfer(wanted.keys[:useful], blocks[:useful], self._epoch, "fetch")
        fetch.snapshots = snapshots
        return fetch

    def _fetch_s(self, wanted: Gap) -> float:
        """The estimate for these blocks behind the fetches in flight."""
        ahead = sum(self._transfer_nbytes(fetch, [True] * len(fetch.blocks)) for fetch in self._fetches.values())
        return self.rates.fetch_s(self._nbytes(wanted) + ahead)

    def _transfer_nbytes(self, transfer: _Transfer, moved: Iterable[bool]) -> int:
        """About how many bytes its objects have that moved."""
        numbers = [number for number, came in enumerate(moved) if came]
        states = sum(number in transfer.snapshots for number in numbers)
        return len(numbers) * self._config.block_nbytes + states * self._config.snapshot_nbytes

    @staticmethod
    def _give_up(waiting: list[Sequence]) -> None:
        for seq in waiting:
            seq.store.regret_s = 0.0

    def fetch_ended(self, event: FetchEnded) -> list[Sequence]:
        """A fetch ended; returns the sequences that are to be matched again."""
        fetch = self._fetches.pop(event.fetch_id, None)
        if fetch is None or len(event.arrived) != len(fetch.blocks):
            raise InvariantBroken(f"fetch {event.fetch_id} ended, and was not in flight")
        self._forget(fetch, fetch.keys)
        came = sum(event.arrived)
        # time after the deadline is the time of a loop that was held up, not the store's
        held_up_s = max(event.at - fetch.deadline, 0.0)
        seconds = event.seconds - held_up_s
        if seconds <= 0 or (held_up_s and not event.late):
            pass
        elif came:
            self.rates.fetched(self._transfer_nbytes(fetch, event.arrived), seconds)
        elif event.late:
            # the store is at least this slow
            self.rates.fetched(self._transfer_nbytes(fetch, [True] * len(fetch.blocks)), seconds)
        self.fetched += came
        waiting = self._still_waiting(fetch)
        if waiting and fetch.epoch == self._epoch:
            self._hold(waiting[0], [block for block, came in zip(fetch.blocks, event.arrived, strict=True) if came])
            self._hold_snapshot(waiting[0], [fetch.snapshots[at] for at in fetch.snapshots if event.arrived[at]])
        self._release(fetch, event.arrived, last=not event.late)
        brought = {key: block.key == key for key, block in zip(fetch.keys, fetch.blocks, strict=True)}
        for seq in waiting:
            seq.store.brought.update(brought)
        if event.late:
            self.cut_off += 1
            self._late[event.fetch_id] = fetch
        if came < len(fetch.blocks):
            self._give_up(waiting)
        return waiting

    def _hold(self, seq: Sequence, blocks: list[Block]) -> None:
        for block in blocks:
            block.hold("request")
            self._index.settle(block)
        seq.store.held += blocks
        self._held += len(blocks)

    def _hold_snapshot(self, seq: Sequence, arrived: list[Snapshot]) -> None:
        """Hold the last of the snapshots that came for it. Earlier ones came only because an object is read whole: they
        make room first, and the store has them."""
        for snapshot in arrived[-1:]:
            snapshot.hold()
            seq.store.held_snapshots.append(snapshot)
        for snapshot in reversed(arrived[:-1]):
            assert self._index.pool.snapshots is not None
            self._index.pool.snapshots.demote(snapshot)

    def _hold_hits(self, seq: Sequence, gap: Gap) -> None:
        """Hold the blocks that are here, before and among the fetched ones, so that they do not make room for the
        fetch. Without them it is useless."""
        last = gap.keys[-1]
        hits = seq.keys[: seq.keys.index(last)] if last in seq.keys else []
        blocks = [block for key in hits if (block := self._index.get(key)) is not None]
        held = dict.fromkeys(seq.store.held)
        self._hold(seq, [block for block in blocks if block.id < 0 and block.on_host and block not in held])

    def let_go(self, seq: Sequence) -> None:
        """The sequence was admitted, or ended: blocks that came for it may be evicted like any other."""
        held, seq.store.held = seq.store.held, []
        self._held -= len(held)
        for block in held:
            block.unhold("request")
            self._index.settle(block)
        snapshots, seq.store.held_snapshots = seq.store.held_snapshots, []
        for snapshot in snapshots:
            self._index.unhold(snapshot)

    def _release(self, transfer: _Transfer, arrived: tuple[bool, ...], *, last: bool) -> int:
        """End the holds on blocks that arrived, or were stored; returns how many did. `last`: end the others too.

        A late block that passed its checks is indexed like any other (docs/design.md, rule 9).
        """
        came = 0
        still = []
        # from the last one on, so that leaves are older than their parents
        for number in reversed(transfer.held):
            block = transfer.blocks[number]
            if not arrived[number] and not last:
                still.append(number)
                continue
            block.unhold(transfer.reason)
            if arrived[number]:
                came += 1
                block.heard(stored=True)
                if transfer.reason == "fetch":
                    block.sealed = block.on_host = True
                    if transfer.epoch == self._epoch:
                        self._index.adopt(block, transfer.keys[number])
            if number in transfer.snapshots:
                self._release_snapshot(transfer, number, arrived=arrived[number])
            self._index.settle(block)
        transfer.held = still[::-1]
        return came

    def _release_snapshot(self, transfer: _Transfer, number: int, *, arrived: bool) -> None:
        """A transfer lets go of a snapshot. A fetched snapshot goes to the block that has its identity now."""
        pool, snapshot = self._index.pool.snapshots, transfer.snapshots[number]
        assert pool is not None
        if transfer.reason == "fetch":
            other = self._index.get(transfer.keys[number]) if transfer.epoch == self._epoch else None
            if arrived:
                pool.received(snapshot)
            if not arrived or other is None or (other is not snapshot.block and other.snapshot is not None):
                pool.drop(snapshot)
            elif other is not snapshot.block:
                pool.move(snapshot, other)
        pool.unhold(snapshot)

    def _forget(self, asked: _Lookup | _Transfer, keys: list[bytes]) -> None:
        for key in keys:
            if self._asked.get(key) is asked:
                del self._asked[key]

    @staticmethod
    def _still_waiting(asked: _Lookup | _Transfer) -> list[Sequence]:
        """The sequences that still wait for this work; from now on they do not."""
        waiting = [seq for seq in asked.waiting if seq.store.waits_for is asked]
        for seq in waiting:
            seq.store.waits_for = None
        return waiting

    # -- writing ------------------------------------------------------------------------------------

    def admitted(self, seq: Sequence, now: float) -> None:
        """`seq` was admitted: check whether the store still has the blocks that it uses."""
        parent, keys = self.chains.used(seq)
        asked = [check[0] for _, check in self._checks.values()]
        if keys and keys[0] not in asked and len(asked) < _MAX_CHECKS:
            self.chains.asked(keys)
            number = self._take_id()
            self._checks[number] = (parent, keys)
            self._asks.append(LookUp(number, self._namespace, tuple(keys), now + _CHECK_S))

    def _checked(self, parent: bytes, keys: list[bytes], event: LookedUp) -> None:
        if event.count > len(keys):
            raise InvariantBroken(f"lookup {event.lookup_id} of {event.count} blocks was not in flight")
        if event.answered:
            self.chains.answered(parent, keys, event.count)

    def _send(self, block: Block) -> None:
        if block.with_state:
            if block.snapshot is None:
                # it made room, or there never was any for it
                self.dropped += block.give_up()
                return
            self._keep_snapshot(block.snapshot)
        if block.on_host:
            self.on_host(block)
        else:
            self._keep(block)

    def on_host(self, block: Block) -> None:
        """A block's KV, or its snapshot, is whole on the host: write it, if it is wanted and all of it is there."""
        if block.wanted and not block.stored and block.can_be_written:
            self._queue.append(block)
            if len(self._queue) > 2 * self._config.num_host_blocks:
                # the store hangs: most of the queued blocks had to make room by now
                self.dropped += sum(block.give_up() for block in self._queue if not block.on_host)
                self._queue = deque(dict.fromkeys(block for block in self._queue if block.on_host))

    def _next_put(self) -> StoreBlocks | None:
        blocks: list[Block] = []
        while self._queue and len(blocks) < _MAX_PUT_BLOCKS:
            block = self._queue.popleft()
            if block in self._writing or not block.wanted:
                # it was queued twice, or the weights changed and it is not wanted any more
                continue
            if block.key is None or not block.can_be_written:
                # it had to make room before its turn came
                self.dropped += block.give_up()
            elif self.chains.gives_up(block):
                self.dropped += 1
            else:
                self._writing[block] = None
                block.hold("write")
                self._index.settle(block)
                blocks.append(block)
        if not blocks:
            return None
        number = self._take_id()
        keys = [block.key for block in blocks if block.key is not None]
        self._puts[number] = put = _Transfer(keys, blocks, self._epoch, "write")
        for place, block in enumerate(blocks):
            if block.with_state and block.snapshot is not None:
                block.snapshot.hold()
                put.snapshots[place] = block.snapshot
        host = tuple([block.host for block in blocks])
        slots = [block.slot for block in blocks if block.slot is not None]
        ids, generations = tuple([slot.id for slot in slots]), tuple([slot.generation for slot in slots])
        return StoreBlocks(
            put_id=number,
            namespace=self._namespace,
            keys=tuple(keys),
            host=host,
            slots=ids,
            generations=generations,
            snapshots_host=put.places(),
        )

    def store_ended(self, event: StoreEnded) -> None:
        put = self._puts.pop(event.put_id, None)
        if put is None or len(event.stored) != len(put.blocks):
            raise InvariantBroken(f"write {event.put_id} ended, and was not in flight")
        self._written(put, self._release(put, event.stored, last=not event.late))
        if event.late:
            self._late[event.put_id] = put

    def _written(self, put: _Transfer, count: int) -> None:
        self.written += count
        if not put.held:
            # the write has ended: a block that was not stored by now was not
            for block in put.blocks:
                if not block.stored:
                    self.dropped += 1
                    block.heard(stored=False)
                block.wanted = False
                self._writing.pop(block, None)

    def late_transfer_ended(self, event: LateTransferEnded) -> None:
        """The late rest of a transfer ended."""
        late = self._late.pop(event.transfer_id, None)
        if late is None or len(event.arrived) != len(late.blocks):
            raise InvariantBroken(f"late transfer {event.transfer_id} ended, and was not in flight")
        came = self._release(late, event.arrived, last=True)
        if late.reason == "fetch":
            self.late_fetched += came
        else:
            self._written(late, came)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def host_holds(self) -> dict[HostHold, int]:
        """How many host blocks are held for transfers, late ones too, and for requests that wait."""
        held: dict[HostHold, int] = {"fetch": 0, "write": 0, "request": self._held}
        for transfer in (*self._fetches.values(), *self._puts.values(), *self._late.values()):
            held[transfer.reason] += len(transfer.held)
        return held

    def snapshot_holds(self, sequences: Iterable[Sequence]) -> Counter[int]:
        """How often each snapshot, by `id`, is held for transfers, and for these requests that wait."""
        transfers = (*self._fetches.values(), *self._puts.values(), *self._late.values())
        moved = [one.snapshots[number] for one in transfers for number in one.held if number in one.snapshots]
        waited = [snapshot for seq in sequences for snapshot in seq.store.held_snapshots]
        return Counter([id(snapshot) for snapshot in (*moved, *waited)])
