"""Blocks: where each computation of a block is, how it is used, in which order, its aux slot. Pure.

A `Block` is one computation. Its KV may sit on the device, on the host, or on both; it has one slot, which goes with
the last of its places. Ids of either tier are in exactly one place: a free list, or one `Block`. This module gives no
meaning to identities (`prefix.py` does) and holds no bytes. The prefix index and the scheduler call it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.cache.aux import Slot, SlotPool
    from fdasync.cache.snapshots import Snapshot, SnapshotPool

# stale entries of an `Lru`'s heap beyond the number of members, before the heap is made again
_SLACK = 64

# why the KV of a block on the host stays there: a copy between device and host reads or writes it; a fetch brings it
# from the store; a write reads it for the store; it was fetched for a request that waits to be admitted; another
# instance reads it (export), or it is being copied from another instance (receive)
HostHold = Literal["copy", "fetch", "write", "request", "export", "receive"]


class Block:
    """One computation of a block: its places, its aux slot, its identity.

    Attributes:
        id: device block id; -1 while it is not on the device.
        host: host block id; -1 while it is not on the host.
        slot: aux slot of this computation; None when capture is off.
        key: identity under which it is indexed; None while private.
        ref_count: sequences that use it on the device.
        step: the step whose completion seals it, while pending; -1 otherwise.
        sealed: complete and immutable.
        arriving: the copy that brings its KV to the device, while under way; else -1.
        device_moves: copies in flight that read or write its KV on the device.
        host_holds: why it cannot leave the host, once for each hold; mostly empty.
        on_host: its KV on the host is whole: no transfer is still bringing it.
        wanted: it is to be written to the store as soon as it is on the host.
        parent: identity of the block before it, set when it becomes wanted; b"" for the first block.
        stored: the store has it, as far as known.
        absent: the store does not have it, as far as known. If neither holds, nothing is known.
        uses: admissions that matched it since the store's last word about it.
        branches: how often a sequence wanted a snapshot here, where it departs from what others had computed.
        last_use: when it was used last, in the index's own count; leaves of a chain before their parents. Below 0:
            no later sequence can make use of it.
        device_list, host_list: the lists of `prefix.py` that it is in; None: none.
        snapshot: the recurrent state at its end (`snapshots.py`); None: there is none.
        with_state: a store's object of it has that state, too.
    """

    __slots__ = (
        "absent",
        "arriving",
        "branches",
        "device_list",
        "device_moves",
        "host",
        "host_holds",
        "host_list",
        "id",
        "key",
        "last_use",
        "on_host",
        "parent",
        "ref_count",
        "sealed",
        "slot",
        "snapshot",
        "step",
        "stored",
        "uses",
        "wanted",
        "with_state",
    )

    def __init__(self, block_id: int, host: int, slot: Slot | None) -> None:
        self.id = block_id
        self.host = host
        self.slot = slot
        self.key: bytes | None = None
        self.ref_count = 0
        self.step = -1
        self.sealed = False
        self.arriving = -1
        self.device_moves = 0
        self.host_holds: tuple[HostHold, ...] = ()
        self.on_host = False
        self.wanted = False
        self.parent = b""
        self.stored = False
        self.absent = False
        self.uses = 0
        self.branches = 0
        self.last_use = 0
        self.device_list: Lru | None = None
        self.host_list: Lru | None = None
        self.snapshot: Snapshot | None = None
        self.with_state = False

    @property
    def can_be_written(self) -> bool:
        """All that a store's object of it has is whole on the host."""
        return self.on_host and (not self.with_state or (self.snapshot is not None and self.snapshot.on_host))

    @property
    def awaits_state(self) -> bool:
        """It is to be written to the store, with its snapshot."""
        return self.wanted and self.with_state

    @property
    def usable(self) -> bool:
        """A step may read its KV on the device."""
        return self.id >= 0 and self.arriving < 0

    def hold(self, reason: HostHold) -> None:
        """Keep it on the host until `unhold` is called with the same reason."""
        self.host_holds += (reason,)

    def unhold(self, reason: HostHold) -> None:
        """Take one hold back. Raises InvariantBroken if there is none for this reason."""
        if reason not in self.host_holds:
            raise InvariantBroken(f"{self} is not held for {reason}")
        at = self.host_holds.index(reason)
        self.host_holds = self.host_holds[:at] + self.host_holds[at + 1 :]

    def heard(self, *, stored: bool) -> None:
        """Note the store's last word about it."""
        self.stored, self.absent, self.uses = stored, not stored, 0

    def give_up(self) -> int:
        """Note that it cannot be written; returns 1 if it was wanted in the store, else 0."""
        if not self.wanted:
            return 0
        self.wanted = False
        self.heard(stored=False)
        return 1

    def without_state(self) -> int:
        """Its snapshot is lost to the host; returns 1 if it was wanted in the store with it, else 0."""
        return self.give_up() if self.with_state else 0

    def __repr__(self) -> str:
        return f"Block({self.id}, host={self.host}, slot={self.slot}, pins={self.ref_count}, sealed={self.sealed})"


class Lru:
    """Blocks in the order of their last use, which they keep while they leave the list and return.

    A block that a transfer touched returns to its old place: being copied or written is no use. The list is a heap by
    last use whose entries may be stale, beside a dict of the members. A member's `last_use` does not change while it is
    in.
    """

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: dict[Block, None] = {}
        # (last use, a number that tells blocks apart, block)
        self._heap: list[tuple[int, int, Block]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, block: Block) -> bool:
        return block in self._members

    def __iter__(self) -> Iterator[Block]:
        """Used longest ago first."""
        return iter(sorted(self._members, key=lambda member: member.last_use))

    def add(self, block: Block) -> None:
        self._members[block] = None
        heapq.heappush(self._heap, (block.last_use, id(block), block))
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [(member.last_use, id(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        self._members.pop(block, None)

    def oldest(self) -> Block:
        """The member used longest ago. There must be one."""
        heap = self._heap
        while heap[0][2] not in self._members or heap[0][0] != heap[0][2].last_use:
            heapq.heappop(heap)
        return heap[0][2]

    def first(self, count: int) -> list[Block]:
        """The members used longest ago, in that order."""
        heap, members = self._heap, self._members
        found: dict[Block, tuple[int, int, Block]] = {}
        # as many steps as blocks are wanted, not as members exist: the engine's loop waits for this
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            block = entry[2]
            if block in members and entry[0] == block.last_use:
                found[block] = entry
        for entry in found.values():
            heapq.heappush(heap, entry)
        return list(found)


class BlockPool:
    """All ids of both tiers, and every block that has one.

    Args:
        slots: None when capture is off; else as many as device and host blocks together.
        num_host_blocks: 0: there is no host tier.
        snapshots: None for a model without recurrent state.

    Attributes:
        num_blocks, num_host_blocks: ids of the device and of the host, free or in use.
        snapshots: as given; a block that goes takes its snapshot with it.
    """

    def __init__(
        self,
        num_blocks: int,
        slots: SlotPool | None,
        num_host_blocks: int = 0,
        snapshots: SnapshotPool | None = None,
    ) -> None:
        self.snapshots = snapshots
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._slots = slots
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._live: dict[Block, None] = {}

    @property
    def num_free(self) -> int:
        """Device ids that no block has."""
        return len(self._free)

    @property
    def num_host_free(self) -> int:
        return len(self._host_free)

    @property
    def num_slots(self) -> int:
        """Places of rows; 0 without capture."""
        return 0 if self._slots is None else self._slots.num_slots

    @property
    def num_free_slots(self) -> int:
        return 0 if self._slots is None else self._slots.num_free

    def allocate(self) -> Block:
        """A fresh block on the device with one pin and, with capture on, a slot of its own. Raises if none is free."""
        if not self._free:
            raise InvariantBroken("allocate was called with no free block")
        block = Block(self._free.pop(), -1, self._slots.acquire() if self._slots is not None else None)
        block.ref_count = 1
        self._live[block] = None
        return block

    def allocate_host(self) -> Block:
        """A fresh block on the host, to be filled by a fetch or from another instance. Raises when none is free."""
        if not self._host_free:
            raise InvariantBroken("allocate_host was called with no free host block")
        block = Block(-1, self._host_free.pop(), self._slots.acquire() if self._slots is not None else None)
        self._live[block] = None
        return block

    def add_device(self, block: Block) -> None:
        """Give a block of the host a place on the device too. Raises when none is free."""
        if not self._free or block.id >= 0:
            raise InvariantBroken(f"{block} cannot get a place on the device")
        block.id = self._free.pop()

    def add_host(self, block: Block) -> None:
        """Give a block of the device a place on the host too. Raises when none is free."""
        if not self._host_free or block.host >= 0:
            raise InvariantBroken(f"{block} cannot get a place on the host")
        block.host = self._host_free.pop()

    def drop_device(self, block: Block) -> None:
        """Take back its place on the device; the slot goes with the last place."""
        if block.ref_count or block.device_moves or block.id < 0 or block not in self._live:
            raise InvariantBroken(f"{block} cannot leave the device")
        self._free.append(block.id)
        block.id = -1
        self._release(block)

    def drop_host(self, block: Block) -> None:
        """Take back its place on the host; the slot goes with the last place."""
        if block.host_holds or block.host < 0 or block not in self._live:
            raise InvariantBroken(f"{block} cannot leave the host")
        self._host_free.append(block.host)
        block.host = -1
        block.on_host = False
        self._release(block)

    def _release(self, block: Block) -> None:
        if block.id < 0 and block.host < 0:
            del self._live[block]
            if block.slot is not None and self._slots is not None:
                self._slots.release(block.slot)
            if block.snapshot is not None and self.snapshots is not None:
                self.snapshots.drop(block.snapshot)

    def live(self) -> list[Block]:
        """Every block that has a place."""
        return list(self._live)

    def check(self) -> None:
        """Raise InvariantBroken unless free ids and live blocks are all there is, once each."""
        for name, free, total, held in (
            ("device", self._free, self.num_blocks, [block.id for block in self._live if block.id >= 0]),
            ("host", self._host_free, self.num_host_blocks, [block.host for block in self._live if block.host >= 0]),
        ):
            if len(set(free)) != len(free):
                raise InvariantBroken(f"a {name} block is free twice")
            if sorted(free + held) != list(range(total)):
                raise InvariantBroken(f"free and live {name} blocks do not add up")
        if self.snapshots is not None:
            self.snapshots.check()
        slots = [block.slot.id for block in self._live if block.slot is not None]
        if len(set(slots)) != len(slots):
            raise InvariantBroken("two blocks share a slot")
        if self._slots is not None:
            self._slots.check()
            if len(slots) != self._slots.num_slots - self._slots.num_free:
                raise InvariantBroken("a slot is in use without a block")
