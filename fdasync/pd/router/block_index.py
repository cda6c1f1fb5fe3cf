"""Knows which instances hold which blocks, and says how much of a prompt's prefix each of them has.

A set of instances is an int, a *bitset* with one bit for each instance's slot, and equal sets of one report are one
object, so that a block costs its identity and two references. Following a prompt takes one look-up for each of its
blocks, however many instances there are, and ends at the first block that none of them has.

Beside the blocks that instances reported it holds those that are *expected*: of prompts that were sent and whose news
has not come. Without them the samples of one prompt that come together would be spread over all instances.

Pure; knows no requests, no load and no limits. Called by `instances.py` and `choice.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def slots_of(bits: int) -> list[int]:
    """The slots of a bitset, in order."""
    slots = []
    while bits:
        low = bits & -bits
        slots.append(low.bit_length() - 1)
        bits ^= low
    return slots


class BlockIndex:
    """See the module. `blocks` of an instance is the set of identities that it has reported; this index changes it, and
    the instance owns it."""

    def __init__(self) -> None:
        # the instances that have a block, or are expected to
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Number of identities that some instance has, or is expected to have."""
        return len(self._holders)

    def add(self, slot: int, blocks: set[bytes], keys: Iterable[bytes]) -> None:
        """An instance has these blocks from now on."""
        bit = 1 << slot
        holders = self._holders
        # equal sets as one object; blocks of one prompt mostly have the same holders
        joined: dict[int, int] = {0: bit}
        for key in keys:
            if key in blocks:
                continue
            blocks.add(key)
            held = holders.get(key, 0)
            both = joined.get(held)
            if both is None:
                both = joined[held] = held | bit
            holders[key] = both

    def remove(self, slot: int, blocks: set[bytes], keys: Iterable[bytes]) -> None:
        """An instance has lost these blocks."""
        self._drop(1 << slot, [key for key in keys if key in blocks])
        blocks.difference_update(keys)

    def clear(self, slot: int, blocks: set[bytes]) -> None:
        """An instance has none of its blocks any more, as far as known."""
        self._drop(1 << slot, blocks)
        blocks.clear()

    def expect(self, slot: int, blocks: set[bytes], keys: Sequence[bytes]) -> list[bytes]:
        """A prompt with these blocks was sent to an instance: it will have them soon. Returns the blocks that it neither
        has nor was expected to have; hand them to `unexpect` when news of them is there or will not come."""
        bit = 1 << slot
        holders = self._holders
        joined: dict[int, int] = {0: bit}
        new = []
        for key in reversed(keys):
            held = holders.get(key, 0)
            if held & bit or key in blocks:
                # those before it are there, too
                break
            both = joined.get(held)
            if both is None:
                both = joined[held] = held | bit
            holders[key] = both
            new.append(key)
        return new

    def unexpect(self, slot: int, blocks: set[bytes], keys: Iterable[bytes]) -> None:
        """No block is expected any more because of that prompt; what the instance has reported stays."""
        self._drop(1 << slot, [key for key in keys if key not in blocks])

    def _drop(self, bit: int, keys: Iterable[bytes]) -> None:
        holders = self._holders
        left: dict[int, int] = {}
        for key in keys:
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
        those that have just so many), the smallest number first. The bitsets are disjoint; together they are `among`.
        """
        if not among:
            return []
        find = self._holders.get
        found = []
        last: int | None = None
        for depth, key in enumerate(keys):
            held = find(key, 0)
            # blocks behind each other mostly have one set
            if held is last:
                continue
            last = held
            if gone := among & ~held:
                found.append((depth, gone))
                among ^= gone
                if not among:
                    return found
        found.append((len(keys), among))
        return found
