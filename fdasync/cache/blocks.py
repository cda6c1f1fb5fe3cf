"""Blocks: where each computation of a block is, who uses it, its aux slot. Pure; no identities (`prefix.py`), no bytes.

A `Block` is one computation. Its KV may sit on the device, on the host, or on both; its slot is one and goes with
the last of its places. Ids of either tier are in exactly one place: a free list, or one `Block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from fdasync.cache.aux import Slot, SlotPool
    from fdasync.cache.lru import Lru


class Block:
    """One computation of a block: its places, its aux slot, its identity.

    Attributes:
        id: device block id; -1 while it is not on the device.
        host: host block id; -1 while it is not on the host.
        slot: aux slot of this computation; None when capture is off.
        key: identity under which it is indexed; None while private.
        pins: sequences that use it on the device.
        step: the step whose completion seals it, while pending; -1 otherwise.
        sealed: complete and immutable.
        arriving: the copy that brings its KV to the device, while under way; else -1.
        device_moves, host_moves: transfers in flight that read or write its KV there. A transfer pins both ends.
        on_host: its KV on the host is whole: no transfer is still bringing it.
        wanted: it shall be written to the store as soon as it is on the host; parent: identity of the block before it,
            b"" for the first, since it was wanted.
        stored: the store has it, as far as known; absent: it has not, as far as known. Neither: nothing is known.
        uses: admissions that came by it since the store's last word about it.
        used: when it was used last, in the index's own count; leaves of a chain before their parents.
        device_list, host_list: the lists of `prefix.py` that it is in.
    """

    __slots__ = (
        "absent",
        "arriving",
        "device_list",
        "device_moves",
        "host",
        "host_list",
        "host_moves",
        "id",
        "key",
        "on_host",
        "parent",
        "pins",
        "sealed",
        "slot",
        "step",
        "stored",
        "used",
        "uses",
        "wanted",
    )

    def __init__(self, block_id: int, host: int, slot: Slot | None) -> None:
        self.id = block_id
        self.host = host
        self.slot = slot
        self.key: bytes | None = None
        self.pins = 0
        self.step = -1
        self.sealed = False
        self.arriving = -1
        self.device_moves = 0
        self.host_moves = 0
        self.on_host = False
        self.wanted = False
        self.parent = b""
        self.stored = False
        self.absent = False
        self.uses = 0
        self.used = 0
        self.device_list: Lru[Block] | None = None
        self.host_list: Lru[Block] | None = None

    @property
    def usable(self) -> bool:
        """A step may read its KV on the device."""
        return self.id >= 0 and self.arriving < 0

    def heard(self, *, stored: bool) -> None:
        """The store's last word about it."""
        self.stored, self.absent, self.uses = stored, not stored, 0

    def give_up(self) -> int:
        """It cannot be written; returns 1 if it should have been, else 0."""
        if not self.wanted:
            return 0
        self.wanted = False
        self.heard(stored=False)
        return 1

    def __repr__(self) -> str:
        return f"Block({self.id}, host={self.host}, slot={self.slot}, pins={self.pins}, sealed={self.sealed})"


class BlockPool:
    """All ids of both tiers, and every block that has one.

    Args:
        slots: None when capture is off; else as many as device and host blocks together.
        num_host_blocks: 0: there is no host tier.
    """

    def __init__(self, num_blocks: int, slots: SlotPool | None, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._slots = slots
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._live: dict[Block, None] = {}

    @property
    def num_free(self) -> int:
        """Device ids that nobody has."""
        return len(self._free)

    @property
    def num_host_free(self) -> int:
        return len(self._host_free)

    def allocate(self) -> Block:
        """A fresh block on the device with one pin and, with capture on, a slot of its own. Raises if none is free."""
        if not self._free:
            raise InvariantBroken("allocate was called with no free block")
        block = Block(self._free.pop(), -1, self._slots.acquire() if self._slots is not None else None)
        block.pins = 1
        self._live[block] = None
        return block

    def allocate_host(self) -> Block:
        """A fresh block on the host, for what a fetch brings. Raises when none is free."""
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
        if block.pins or block.device_moves or block.id < 0 or block not in self._live:
            raise InvariantBroken(f"{block} cannot leave the device")
        self._free.append(block.id)
        block.id = -1
        self._release(block)

    def drop_host(self, block: Block) -> None:
        """Take back its place on the host; the slot goes with the last place."""
        if block.host_moves or block.host < 0 or block not in self._live:
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
        slots = [block.slot.id for block in self._live if block.slot is not None]
        if len(set(slots)) != len(slots):
            raise InvariantBroken("two blocks share a slot")
        if self._slots is not None:
            self._slots.check()
            if len(slots) != self._slots.num_slots - self._slots.num_free:
                raise InvariantBroken("a slot is in use without a block")
