"""The host arena: the bytes of all aux slots, in one memfd of a fixed size that engine and worker share.

Layout: a section of row tags, uint32 [num_slots, block_tokens], then one section per spec,
[num_slots, block_tokens, *shape], each section aligned to 4 KiB, then the counts of chosen experts
(`picks.py`), where routing is counted. A row's tag is the generation of the
slot's use that wrote it: a row counts only while its tag equals the generation asked for, so a row
that was never written, or was written for another use of the slot, is never returned (fail closed).

The runner writes (`scatter`), the engine reads (`copy_rows`) once `StepDone` has come. This module does not know what
rows mean, nor which block a slot belongs to. Runners, the engine's row copies, store I/O and transfers call it.
"""

from __future__ import annotations

from sys import byteorder
from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import ROUTING, AuxSpec
from fdasync.cache.picks import PickShape, PickTable
from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import Part, SharedRegion, page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray


def arena_nbytes(num_slots: int, block_tokens: int, specs: Sequence[AuxSpec], picks: PickShape | None = None) -> int:
    """Size of the arena in bytes, before anything is allocated."""
    rows = num_slots * block_tokens
    counts = 0 if picks is None else page_aligned(picks.nbytes)
    return page_aligned(rows * 4) + sum(page_aligned(rows * spec.token_nbytes) for spec in specs) + counts


class AuxArena:
    """Shared rows of all slots.

    Attributes:
        region: the shared memory, owned by this object; the worker and store processes get `region.fd`.
        num_slots, block_tokens: slots, and rows of each slot.
        specs: kinds of data, in the order of their sections.
        rows: per spec name, an array [num_slots * block_tokens, *shape] over the shared bytes.
        written_nbytes: bytes of the rows that `scatter` wrote through this object.
        picks: counts of the experts in rows that were written by `scatter`; None: nothing counts.
    """

    # how it crosses to another process (`ipc/remote.py`)
    plan_type = tuple[int, int, tuple[AuxSpec, ...], PickShape | None]

    def __init__(
        self,
        region: SharedRegion,
        num_slots: int,
        block_tokens: int,
        specs: Sequence[AuxSpec],
        picks: PickShape | None = None,
    ) -> None:
        self.region = region
        self.num_slots = num_slots
        self.block_tokens = block_tokens
        self.specs = tuple(specs)
        self.written_nbytes = 0
        count = num_slots * block_tokens
        self._tags: NDArray[np.uint32] = np.frombuffer(region.map, np.uint32, count)
        self.rows: dict[str, NDArray[np.generic]] = {}
        self._by_slot: dict[str, NDArray[np.generic]] = {}
        # of each spec: where its section begins, and how many bytes a slot takes there
        self._runs: list[tuple[int, int]] = []
        offset = page_aligned(count * 4)
        for spec in self.specs:
            flat = np.frombuffer(region.map, spec.dtype, count * int(np.prod(spec.shape)), offset)
            self.rows[spec.name] = flat.reshape(count, *spec.shape)
            self._by_slot[spec.name] = flat.reshape(num_slots, block_tokens, *spec.shape)
            self._runs.append((offset, block_tokens * spec.token_nbytes))
            offset += page_aligned(count * spec.token_nbytes)
        self.picks = None if picks is None else PickTable(picks, region.view(offset, picks.nbytes))

    @classmethod
    def create(
        cls, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec], picks: PickShape | None = None
    ) -> AuxArena:
        """A new arena. Pages are touched lazily, by the runner that writes them. Raises OSError."""
        region = SharedRegion.create("aux", arena_nbytes(num_slots, block_tokens, specs, picks))
        return cls(region, num_slots, block_tokens, specs, picks)

    @classmethod
    def attach(cls, plan: tuple[int, int, tuple[AuxSpec, ...], PickShape | None], fds: Iterator[int]) -> AuxArena:
        """The arena of another process; its descriptor belongs to the result. Raises InvariantBroken if it is too
        small, OSError."""
        return cls(SharedRegion(next(fds), arena_nbytes(*plan)), *plan)

    @property
    def plan(self) -> tuple[int, int, tuple[AuxSpec, ...], PickShape | None]:
        picks = None if self.picks is None else self.picks.shape
        return self.num_slots, self.block_tokens, self.specs, picks

    @property
    def fds(self) -> tuple[int, ...]:
        return self.region.fds

    def scatter(
        self, index: NDArray[np.integer], generations: NDArray[np.integer], values: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Write whole rows: `index` [n] is slot * block_tokens + offset, `generations` [n] the use of each slot,
        `values[name]` [n, *shape] of the spec's dtype, for every spec. Tags are written last.

        Raises InvariantBroken, before anything is written, unless names, shapes and dtypes are exactly as in the specs:
        a row is valid for all of them or for none, so a spec left out would keep bytes of an earlier use.
        """
        self._check(index, generations, values)
        for name, rows in values.items():
            self.rows[name][index] = rows
            self.written_nbytes += rows.nbytes
        self._tags[index] = generations
        if self.picks is not None:
            self.picks.add(values[ROUTING])

    def _check(
        self, index: NDArray[np.integer], generations: NDArray[np.integer], values: Mapping[str, NDArray[np.generic]]
    ) -> None:
        count = len(index)
        if values.keys() != self.rows.keys():
            missing = sorted(self.rows.keys() - values.keys())
            unknown = sorted(values.keys() - self.rows.keys())
            raise InvariantBroken(f"aux rows were written without {missing} and with {unknown}: every spec, or none")
        for spec in self.specs:
            rows, shape = values[spec.name], (count, *spec.shape)
            if rows.dtype != spec.dtype or rows.shape != shape:
                raise InvariantBroken(
                    f"aux rows of {spec.name!r} are {rows.dtype} {list(rows.shape)}, its spec says "
                    f"{spec.dtype} {list(shape)} for {count} tokens"
                )
        if index.shape != (count,) or generations.shape != (count,):
            raise InvariantBroken(f"{list(generations.shape)} generations for {list(index.shape)} aux rows")
        if index.dtype.kind not in "iu" or generations.dtype.kind not in "iu":
            raise InvariantBroken(
                f"aux rows are written at {index.dtype} for {generations.dtype}, which are no integers"
            )
        if not count:
            return
        # 0 is no use of a slot, and a number above 32 bits would be cut to that of another use
        if not (generations.all() and _most(generations) < 1 << 32):
            raise InvariantBroken(f"aux rows of generations {int(generations.min())} to {int(generations.max())}")
        # a negative index would count from the end, in another slot
        if _most(index) >= self.num_slots * self.block_tokens:
            raise InvariantBroken(
                f"aux rows {int(index.min())} to {int(index.max())} of {self.num_slots * self.block_tokens}"
            )

    def copy_rows(
        self,
        slots: Sequence[int],
        generations: Sequence[int],
        offset: int,
        count: int,
        into: Mapping[str, NDArray[np.generic]],
        at: int,
    ) -> None:
        """Copy rows [offset, offset + count) of slots, one behind the other, to `into[name][at : at + count]`, for
        every name in it. `generations` has the use of each slot.

        Raises InvariantBroken, before anything is copied, if a row was not written for its slot's generation.
        """
        self._check_slots(slots, generations, offset, count)
        index = np.array(slots)
        for name, rows in into.items():
            # of all slots at once: a copy for each costs twice as much
            found = self._by_slot[name].take(index, axis=0)
            rows[at : at + count] = found.reshape(-1, *found.shape[2:])[offset : offset + count]

    def _check_slots(self, slots: Sequence[int], generations: Sequence[int], offset: int, count: int) -> None:
        size, stop = self.block_tokens, offset + count
        # they end in the last slot: of a slot behind it nothing would be copied, and no row be checked
        if not (
            slots
            and len(slots) == len(generations)
            and 0 <= offset < size
            and (len(slots) - 1) * size < stop <= len(slots) * size
        ):
            raise InvariantBroken(
                f"aux rows {offset} to {stop - 1} of {len(slots)} slots of {size} rows and {len(generations)} uses"
            )
        known = min(slots) >= 0 and max(slots) < self.num_slots and min(generations) > 0 and max(generations) < 1 << 32
        if known:
            found = self._tags.reshape(-1, size).take(slots, axis=0)
            wanted = np.array(generations, np.uint32).repeat(size)
            # compared as bytes: an array of booleans costs more
            if found.reshape(-1)[offset:stop].tobytes() == wanted[offset:stop].tobytes():
                return
        for number, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            first = max(offset - number * size, 0)
            self.check_written(slot, generation, first, min(stop - number * size, size) - first)

    def check_written(self, slot: int, generation: int, offset: int, count: int) -> None:
        """Raise InvariantBroken unless rows [offset, offset + count) of a slot were written for this use of it. Callers
        check so before they copy rows, store them or offer them to another instance."""
        if not (0 <= slot < self.num_slots and offset >= 0 and 0 <= count <= self.block_tokens - offset):
            raise InvariantBroken(f"aux rows {offset} to {offset + count - 1} of slot {slot} of {self.num_slots}")
        first = slot * self.block_tokens + offset
        # memory that was never written holds 0, which is no generation
        known = 0 < generation < 1 << 32
        # compared as bytes: an array of booleans costs ten times as much, and this is asked for every block
        if not known or self._tags[first : first + count].tobytes() != generation.to_bytes(4, byteorder) * count:
            raise InvariantBroken(
                f"aux rows {offset} to {offset + count - 1} of slot {slot} were not written for generation "
                f"{generation}: the runner's capture missed them"
            )

    def parts(self, slot: int, region: int) -> tuple[Part, ...]:
        """Where the rows of a slot lie, a part for each spec; `region` is this region's number in `Store.open`."""
        return tuple([Part(region, offset + slot * nbytes, nbytes) for offset, nbytes in self._runs])

    def adopt(self, slot: int, generation: int, count: int | None = None) -> None:
        """Make the first `count` rows of a slot (None: all) valid for this use of it, and no others: they came with
        their block from a store or another instance, and were checked."""
        first = slot * self.block_tokens
        stop = first + (self.block_tokens if count is None else count)
        self._tags[first:stop] = generation
        self._tags[stop : first + self.block_tokens] = 0

    def close(self) -> None:
        """Drop the mapping and the fd; idempotent. The bytes live on while a view of `rows` does."""
        self._tags = np.empty(0, np.uint32)
        self.picks = None
        self.rows.clear()
        self._by_slot.clear()
        self.region.close()


def _most(values: NDArray[np.integer]) -> int:
    """The largest of some integers, where a negative one is larger than any other."""
    # read as unsigned: one pass over the values instead of two
    return int(values.view(f"u{values.itemsize}").max())
