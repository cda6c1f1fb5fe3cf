"""Knows which instances have which blocks, and says how much of a prompt's prefix each of them has.

A set of instances is an int, a *bitset* with one bit for each instance's slot, and equal sets of one report are one
object. So a block costs its identity and two references, and 16 bytes for each instance that has it. Following a prompt
takes one look-up for each of its blocks, however many instances there are, and ends at the first block that none has.

Beside the blocks that instances reported it holds *expected* blocks: of prompts that were sent, before the instance
reports their blocks. Without them the samples of one prompt that come together would be spread over all instances.

Pure; knows no requests, no load and no limits. Called by `instances.py` and `choice.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.identity import KEY_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# identities are even hashes: one part for each first byte. A table that grows is copied, and a part is a small one
_PARTS = 256
# identities of blocks that were lost, beyond which they are dropped
_STALE = 1024


def slots_of(bits: int) -> list[int]:
    """The slots of a bitset, in order."""
    slots = []
    while bits:
        low = bits & -bits
        slots.append(low.bit_length() - 1)
        bits ^= low
    return slots


class _Known:
    """What is known of one instance.

    Attributes:
        keys: identities of its blocks, one behind the other, and of blocks that it lost.
        count: number of blocks that it has.
        expected: identities of blocks that it is expected to have.
    """

    __slots__ = ("count", "expected", "keys")

    def __init__(self) -> None:
        self.keys = bytearray()
        self.count = 0
        self.expected: set[bytes] = set()


class BlockIndex:
    """See the module."""

    def __init__(self) -> None:
        # the instances that have a block, or are expected to
        self._holders: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        """Number of identities that some instance has, or is expected to have."""
        return sum(map(len, self._holders))

    def open(self, slot: int) -> None:
        """A new instance, which has no blocks."""
        self._known[slot] = _Known()

    def close(self, slot: int) -> None:
        """The instance is used no more; what was expected of it is still to be handed to `unexpect`, of another
        index."""
        self.clear(slot)
        self._drop(1 << slot, self._known.pop(slot).expected)

    def count(self, slot: int) -> int:
        """Number of blocks that an instance has reported."""
        return self._known[slot].count

    def blocks(self, slot: int) -> set[bytes]:
        """Identities of the blocks that an instance has reported; takes a while."""
        known, bit = self._known[slot], 1 << slot
        return {key for key in _split(known.keys) if self._has(bit, key) and key not in known.expected}

    def _has(self, bit: int, key: bytes) -> bool:
        return bool(self._holders[key[0]].get(key, 0) & bit)

    def add(self, slot: int, keys: Iterable[bytes]) -> None:
        """An instance has these blocks from now on."""
        bit, known, parts = 1 << slot, self._known[slot], self._holders
        expected, kept = known.expected, known.keys
        # equal sets as one object; blocks of one prompt mostly have the same holders
        joined: dict[int, int] = {0: bit}
        count = 0
        for key in keys:
            holders = parts[key[0]]
            held = holders.get(key, 0)
            if held & bit:
                if key not in expected:
                    continue
                expected.remove(key)
            else:
                both = joined.get(held)
                if both is None:
                    both = joined[held] = held | bit
                holders[key] = both
            kept += key
            count += 1
        known.count += count

    def remove(self, slot: int, keys: Iterable[bytes]) -> None:
        """An instance has lost these blocks."""
        bit, known = 1 << slot, self._known[slot]
        lost = [key for key in keys if self._has(bit, key) and key not in known.expected]
        self._drop(bit, lost)
        known.count -= len(lost)
        if len(known.keys) // KEY_NBYTES > 2 * known.count + _STALE:
            known.keys = bytearray().join(self.blocks(slot))

    def clear(self, slot: int) -> None:
        """An instance has none of its blocks any more, as far as known."""
        known = self._known[slot]
        if known.keys:
            self._drop(1 << slot, [key for key in _split(known.keys) if key not in known.expected])
            known.keys, known.count = bytearray(), 0

    def expect(self, slot: int, keys: Sequence[bytes]) -> list[bytes]:
        """A prompt with these blocks was sent to an instance: it will have them soon.

        Returns the blocks that it neither has nor was expected to have; hand them to `unexpect` when news of them is
        there or will not come."""
        bit, known = 1 << slot, self._known[slot]
        joined: dict[int, int] = {0: bit}
        new = []
        for key in reversed(keys):
            holders = self._holders[key[0]]
            held = holders.get(key, 0)
            if held & bit:
                # those before it are there, too
                break
            both = joined.get(held)
            if both is None:
                both = joined[held] = held | bit
            holders[key] = both
            new.append(key)
        known.expected.update(new)
        return new

    def unexpect(self, slot: int, keys: Iterable[bytes]) -> None:
        """No block is expected any more because of that prompt; what the instance has reported stays."""
        expected = self._known[slot].expected
        if expected:
            gone = [key for key in keys if key in expected]
            expected.difference_update(gone)
            self._drop(1 << slot, gone)

    def _drop(self, bit: int, keys: Iterable[bytes]) -> None:
        left: dict[int, int] = {}
        for key in keys:
            holders = self._holders[key[0]]
            held = holders.get(key, 0)
            rest = left.get(held)
            if rest is None:
                rest = left[held] = held & ~bit
            if rest:
                holders[key] = rest
            else:
                holders.pop(key, None)

    def prefixes(self, keys: Sequence[bytes], among: int) -> list[tuple[int, int]]:
        """How many leading blocks of a prompt each instance of a bitset has, or is expected to have: (number, bitset of
        the instances with that number), the smallest first. The bitsets are disjoint; together they are `among`.
        """
        if not among:
            return []
        parts = self._holders
        found = []
        last: int | None = None
        depth = 0
        try:
            for depth, key in enumerate(keys):
                held = parts[key[0]][key]
                # blocks behind each other mostly have one set
                if held is last:
                    continue
                last = held
                if gone := among & ~held:
                    found.append((depth, gone))
                    among ^= gone
                    if not among:
                        return found
        except KeyError:
            # no instance has this block
            found.append((depth, among))
            return found
        found.append((len(keys), among))
        return found


def _split(keys: bytearray) -> list[bytes]:
    whole = bytes(keys)
    return [whole[first : first + KEY_NBYTES] for first in range(0, len(whole), KEY_NBYTES)]
