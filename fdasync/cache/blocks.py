"""Device blocks: ids, pins, free list. Pure; knows no identities (that is `prefix.py`) and no bytes.

free list --allocate--> pinned (open, pending or sealed) --last unpin--> idle (indexed) --evict--+
    ^                                     |                                                      |
    +-------------------------------------+ last unpin, not indexed <---- allocate takes it <----+
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from fdasync.cache.aux import Slot, SlotPool


class Block:
    """One computation of a block: its place on the device, its aux slot, its identity.

    Attributes:
        id: device block id.
        slot: aux slot of this computation; None when capture is off.
        key: identity under which it is indexed; None while private.
        pins: sequences that use it.
        step: the step whose completion seals it, while pending; -1 otherwise.
        sealed: complete and immutable.
    """

    __slots__ = ("id", "key", "pins", "sealed", "slot", "step")

    def __init__(self, block_id: int, slot: Slot | None) -> None:
        self.id = block_id
        self.slot = slot
        self.key: bytes | None = None
        self.pins = 1
        self.step = -1
        self.sealed = False

    def __repr__(self) -> str:
        return f"Block({self.id}, slot={self.slot}, pins={self.pins}, sealed={self.sealed})"


class BlockPool:
    """All device blocks. Every block is in exactly one place: the free list, or one `Block`."""

    def __init__(self, num_blocks: int, slots: SlotPool | None) -> None:
        self.num_blocks = num_blocks
        self._slots = slots
        self._free = list(range(num_blocks - 1, -1, -1))
        self._live: dict[int, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        """A fresh block with one pin and, with capture on, a slot of its own. Raises when none is free."""
        if not self._free:
            raise InvariantBroken("allocate was called with no free block")
        block_id = self._free.pop()
        block = Block(block_id, self._slots.acquire() if self._slots is not None else None)
        self._live[block_id] = block
        return block

    def free(self, block: Block) -> None:
        """Give back a block that nobody pins and that is not indexed."""
        if block.pins or block.key is not None or self._live.get(block.id) is not block:
            raise InvariantBroken(f"{block} cannot be freed")
        del self._live[block.id]
        if block.slot is not None and self._slots is not None:
            self._slots.release(block.slot)
        self._free.append(block.id)

    def live(self) -> list[Block]:
        """Every block that is not free."""
        return list(self._live.values())

    def check(self) -> None:
        """Raise InvariantBroken unless free and live blocks are all the blocks, once each."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantBroken("a block is free twice")
        if free & self._live.keys() or len(free) + len(self._live) != self.num_blocks:
            raise InvariantBroken("free and live blocks do not add up")
        slots = [block.slot.id for block in self._live.values() if block.slot is not None]
        if len(set(slots)) != len(slots):
            raise InvariantBroken("two blocks share a slot")
        if self._slots is not None:
            self._slots.check()
            if len(slots) != self._slots.num_slots - self._slots.num_free:
                raise InvariantBroken("a slot is in use without a block")
