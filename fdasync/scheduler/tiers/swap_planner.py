"""Plans copies of blocks between device and host. Pure.

Blocks that shall be kept beyond the device go out (`keep`). When free blocks run short, idle blocks that are nowhere
else go out too; such a device block comes back as soon as its copy is done. Blocks of the host that a request hit come
in: the request holds their device places from the same turn on (docs/design.md, rule 8) and starts when they have
arrived. Several copies are in flight at a time; steps that do not need them go on.

This module knows requests only as sequences that wait for copies, and no bytes. Called by `core.py`, `step_planner.py`,
`tiers.py`, `write_policy.py` and `disagg/`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.scheduler.state.hold import Export
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block, HostHold
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.cache.snapshots import Snapshot
    from fdasync.scheduler.state.config import SchedulerConfig

# a copy is worth a message, and must not hold a queue up
_MAX_COPY_BLOCKS = 64
_MAX_OUTWARD = 4
# idle blocks are copied out ahead of need, so that a decode rarely waits for one (docs/design.md, rule 32)
_AHEAD_SHARE = 16
_AHEAD_MAX_BLOCKS = 64


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy in flight.

    Attributes:
        blocks, snapshots: what it copies.
        outward: from the device to the host.
        waiting: sequences that wait for it.
    """

    blocks: list[Block]
    outward: bool
    snapshots: list[Snapshot]
    waiting: list[Sequence] = field(default_factory=list)


class SwapPlanner:
    """See the module.

    Attributes:
        enabled: there is a host tier.
        dropped: blocks that should have been kept, and found no room on the host.
        out_blocks, in_blocks: blocks copied to the host, and to the device, so far.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex) -> None:
        self._index = index
        self.enabled = config.num_host_blocks > 0
        self._ahead = min(config.num_blocks // _AHEAD_SHARE, _AHEAD_MAX_BLOCKS)
        self._queue: deque[Block] = deque()
        self._snapshot_queue: deque[Snapshot] = deque()
        self._ahead_snapshots = -(-config.num_snapshots // _AHEAD_SHARE) if config.num_host_snapshots else 0
        self._copies: dict[int, _Copy] = {}
        self._next_id = 0
        self._needed = 0
        self._outward = 0
        self._exports: deque[Export] = deque()
        self._held = 0
        self._pinned: dict[Export, None] = {}
        self._loads: list[SwapIn] = []
        self.dropped = 0
        self.out_blocks = 0
        self.in_blocks = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._copies)

    @property
    def num_queued(self) -> int:
        return len(self._queue) + len(self._snapshot_queue)

    @property
    def num_leaving(self) -> int:
        """Idle device blocks that come back by themselves: on their way out, or about to be."""
        return self._on_their_way() + (self._index.num_dirty if self._index.has_host_room else 0)

    def _on_their_way(self) -> int:
        return sum(1 for copy in self._copies.values() for block in copy.blocks if not block.ref_count)

    def keep(self, block: Block) -> None:
        """Copy a sealed block to the host soon, if it is not there; it may be in use meanwhile."""
        if self.enabled and block.host < 0:
            self._queue.append(block)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Copy it to the host soon, if it is not there."""
        if self.enabled and snapshot.host < 0:
            self._snapshot_queue.append(snapshot)

    def need(self, count: int) -> None:
        """A sequence lacked device blocks in this turn: see that this many can be had."""
        self._needed = max(self._needed, count)

    def export(self, block: Block) -> Export:
        """Bring a block to the host, and hold it there for another instance. The block is sealed, or an open block that
        no step writes any more."""
        export = Export(block)
        if block.host >= 0:
            self._hold(export)
        else:
            self._exports.append(export)
        return export

    def pin(self, block: Block) -> Export:
        """Hold a block on the device for another instance, which reads it there. The block is there, and is sealed, or
        open but written by no step any more."""
        export = Export(block, on_device=True)
        export.held = True
        self._pinned[export] = None
        self._index.pin([block])
        self._index.lent += 1
        return export

    @property
    def pinned(self) -> list[Block]:
        """Device blocks that exports keep in place, once for each."""
        return [export.block for export in self._pinned]

    def _hold(self, export: Export) -> None:
        export.held = True
        self._held += 1
        export.block.hold("export")
        self._index.settle(export.block)

    def release(self, export: Export) -> None:
        """No instance reads the block any more; idempotent."""
        export.wanted = False
        if export.on_device:
            if export.held:
                export.held = False
                del self._pinned[export]
                self._index.lent -= 1
                self._index.release([export.block])
        elif export.held:
            export.held = False
            self._held -= 1
            export.block.unhold("export")
            self._index.settle(export.block)

    def bring(self, blocks: list[Block]) -> list[int]:
        """Copy these from the host to the device places that they have; returns the numbers of the copies."""
        return [
            self._bring(blocks[first : first + _MAX_COPY_BLOCKS]) for first in range(0, len(blocks), _MAX_COPY_BLOCKS)
        ]

    def load(self, seq: Sequence, hits: list[Block], fresh: list[Block]) -> None:
        """Bring `fresh`, blocks of the host that just got their device ids, and let `seq` wait for all of its hits
        that are on their way, others' too, and for the snapshot that it starts from."""
        self.bring(fresh)
        for number in sorted({block.arriving for block in hits if block.arriving >= 0}):
            seq.arrivals += 1
            self._copies[number].waiting.append(seq)
        if seq.resume is not None and not seq.resume.on_device:
            seq.arrivals += 1
            self._copies[self.bring_snapshot(seq.resume)].waiting.append(seq)

    def bring_snapshot(self, snapshot: Snapshot) -> int:
        """Copy it from the host to its place on the device, unless a copy is under way; returns the copy's number."""
        if snapshot.arriving < 0:
            snapshot.arriving = self._start([], outward=False, snapshots=[snapshot])
            self._loads.append(
                SwapIn(snapshot.arriving, (), (), snapshots_host=(snapshot.host,), snapshots=(snapshot.place,))
            )
        return snapshot.arriving

    def _bring(self, batch: list[Block]) -> int:
        number = self._start(batch, outward=False)
        slots = [block.slot for block in batch if block.slot is not None]
        self._loads.append(
            SwapIn(
                copy_id=number,
                host=tuple([block.host for block in batch]),
                device=tuple([block.id for block in batch]),
                slots=tuple([slot.id for slot in slots]),
                generations=tuple([slot.generation for slot in slots]),
            )
        )
        return number

    def forget(self, seq: Sequence) -> None:
        """The sequence waits for no copy any more; the copies go on."""
        if seq.arrivals:
            seq.arrivals = 0
            for copy in self._copies.values():
                copy.waiting = [other for other in copy.waiting if other is not seq]

    def plan(self, *, ahead: bool = True) -> list[SwapIn | SwapOut]:
        """The copies of this turn; `ahead`: also copies that make room before it is needed."""
        actions: list[SwapIn | SwapOut] = [*self._loads]
        self._loads.clear()
        if not self.enabled:
            return actions
        if self._exports:
            actions += self._send_exports()
        if ahead:
            self._demote()
        actions += self._send_snapshots(ahead=ahead)
        while self._queue and self._outward < _MAX_OUTWARD:
            batch = self._next_batch()
            if batch:
                actions.append(self._send(batch))
        self._needed = 0
        return actions

    def _send_exports(self) -> list[SwapOut]:
        """Hold the exports that are on the host, and send others there as far as there is room, in order."""
        waiting: deque[Export] = deque()
        batch: list[Block] = []
        for export in self._exports:
            block = export.block
            if not export.wanted or export.gone:
                continue
            if block.host < 0 and (
                waiting or self._outward >= _MAX_OUTWARD or len(batch) >= _MAX_COPY_BLOCKS or not self._make_room()
            ):
                waiting.append(export)
                continue
            if block.host < 0:
                self._index.pool.add_host(block)
                batch.append(block)
            self._hold(export)
        self._exports = waiting
        return [self._send(batch)] if batch else []

    def _send(self, batch: list[Block]) -> SwapOut:
        number = self._start(batch, outward=True)
        return SwapOut(number, tuple([block.id for block in batch]), tuple([block.host for block in batch]))

    def _send_snapshots(self, *, ahead: bool) -> list[SwapOut]:
        """Copy out the snapshots that shall be kept, and snapshots whose copies make room before it is needed."""
        pool = self._index.pool.snapshots
        if pool is None or self._outward >= _MAX_OUTWARD:
            return []
        if ahead and not pool.has_clean(self._ahead_snapshots) and pool.has_host_room:
            self._snapshot_queue.extend(pool.next_dirty(self._ahead_snapshots))
        batch: list[Snapshot] = []
        coming: list[Snapshot] = []
        while self._snapshot_queue and len(batch) < _MAX_COPY_BLOCKS:
            snapshot = self._snapshot_queue.popleft()
            if (snapshot.block is None and not snapshot.holds) or snapshot.host >= 0:
                # it was evicted, or went out meanwhile
                continue
            if snapshot.step >= 0:
                # the step that takes it is in flight
                coming.append(snapshot)
                continue
            if not pool.add_host(snapshot):
                self.dropped += 0 if snapshot.block is None else snapshot.block.without_state()
                continue
            # at once, or the next one's search for room could take it back
            snapshot.moves += 1
            batch.append(snapshot)
        self._snapshot_queue.extendleft(reversed(coming))
        for snapshot in batch:
            snapshot.moves -= 1
        if not batch:
            return []
        number = self._start([], outward=True, snapshots=batch)
        places, hosts = tuple([one.place for one in batch]), tuple([one.host for one in batch])
        return [SwapOut(copy_id=number, device=(), host=(), snapshots=places, snapshots_host=hosts)]

    def _make_room(self) -> bool:
        return self._index.make_host_room(for_fetch=True)

    def _demote(self) -> None:
        """Idle blocks that are nowhere else go out while there is time, oldest first."""
        index = self._index
        if not index.num_dirty or self._outward >= _MAX_OUTWARD:
            return
        lacking = max(self._needed, self._ahead) - index.num_available - self._on_their_way()
        if lacking > 0 and index.has_host_room:
            # blocks that make room now go before blocks that shall only be kept
            self._queue.extendleft(reversed(index.next_dirty(lacking)))

    def _next_batch(self) -> list[Block]:
        """Take the next blocks off the queue and give them places on the host."""
        batch: list[Block] = []
        while self._queue and len(batch) < _MAX_COPY_BLOCKS:
            block = self._queue.popleft()
            if block.key is None or block.host >= 0 or not block.usable:
                # it was evicted, replaced, or went out meanwhile
                if block.host < 0:
                    self.dropped += block.give_up()
                continue
            if not block.sealed:
                raise InvariantBroken(f"{block} was to be copied out while a step writes it")
            if not self._index.make_host_room(for_store=block.wanted):
                self.dropped += 1
                block.give_up()
                continue
            self._index.pool.add_host(block)
            # at once, or the next one's search for room could take it back
            block.hold("copy")
            batch.append(block)
        for block in batch:
            block.unhold("copy")
        return batch

    def _start(self, blocks: list[Block], *, outward: bool, snapshots: list[Snapshot] | None = None) -> int:
        number = self._next_id
        self._next_id += 1
        self._copies[number] = _Copy(blocks, outward, snapshots or [])
        for snapshot in snapshots or ():
            snapshot.moves += 1
        self._outward += outward
        for block in blocks:
            block.device_moves += 1
            block.hold("copy")
            if not outward:
                block.arriving = number
            self._index.settle(block)
        return number

    def done(self, number: int) -> tuple[list[Block], list[Sequence]]:
        """A copy ended; returns the blocks whose KV or snapshot is whole on the host now, and the sequences that wait
        for no other copy."""
        copy = self._copies.pop(number, None)
        if copy is None:
            raise InvariantBroken(f"copy {number} ended, and was not in flight")
        self._outward -= copy.outward
        whole = []
        for block in copy.blocks:
            block.device_moves -= 1
            block.unhold("copy")
            if copy.outward:
                self.out_blocks += 1
                block.on_host = True
            else:
                self.in_blocks += 1
                block.arriving = -1
            self._index.settle(block)
            if copy.outward and block.key is not None:
                whole.append(block)
        for snapshot in copy.snapshots:
            snapshot.moves -= 1
            if copy.outward:
                snapshot.on_host = True
            else:
                snapshot.arriving = -1
                snapshot.on_device = True
            assert self._index.pool.snapshots is not None
            self._index.pool.snapshots.moved(snapshot)
            if copy.outward and snapshot.block is not None and snapshot.block.key is not None:
                carrier = self._index.get(snapshot.block.key)
                if carrier is not None and carrier.on_host:
                    whole.append(carrier)
        ready = []
        for seq in copy.waiting:
            seq.arrivals -= 1
            if not seq.arrivals:
                ready.append(seq)
        return whole, ready

    def host_holds(self) -> dict[HostHold, int]:
        """How many host blocks stay in place for copies and exports."""
        return {"copy": sum(len(copy.blocks) for copy in self._copies.values()), "export": self._held}

    def check(self) -> None:
        """Raise InvariantBroken unless the blocks in copies, and the sequences that wait for copies, know it."""
        arriving: dict[int, int] = {}
        moves = Counter([id(one) for copy in self._copies.values() for one in copy.snapshots])
        for snapshot in self._index.pool.snapshots.live() if self._index.pool.snapshots else ():
            if snapshot.moves != moves[id(snapshot)]:
                raise InvariantBroken(f"{snapshot} has {snapshot.moves} copies, {moves[id(snapshot)]} know it")
        waits: dict[int, int] = {}
        for number, copy in self._copies.items():
            for block in copy.blocks:
                if block.id < 0 or block.host < 0 or not block.device_moves or "copy" not in block.host_holds:
                    raise InvariantBroken(f"{block} is in copy {number} and lacks a place or a move")
                if not copy.outward:
                    arriving[id(block)] = number
            for seq in copy.waiting:
                waits[seq.key] = waits.get(seq.key, 0) + 1
                if seq.state is not State.LOADING or seq.arrivals < waits[seq.key]:
                    raise InvariantBroken(f"sequence {seq.key} waits for copy {number}, and does not know it")
        for block in self._index.pool.live():
            if block.arriving != arriving.get(id(block), -1):
                raise InvariantBroken(f"{block} arrives with copy {block.arriving}, and does not")
