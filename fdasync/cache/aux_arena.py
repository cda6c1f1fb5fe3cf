"""The host arena: the bytes of all aux slots, in one sealed memfd that engine and worker share.

Layout: a section of row tags, uint32 [num_slots, block_tokens], then one section per spec,
[num_slots, block_tokens, *shape], each section aligned to 4 KiB. A row's tag is the generation of the
slot's use that wrote it: a row counts only while its tag equals the generation asked for, so a row
that was never written, or was written for another use of the slot, is never returned (fail closed).

The runner writes (`scatter`), the engine reads (`copy_rows`); the receipt of `StepDone` orders the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import Part, SharedRegion, page_aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec


def arena_nbytes(num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> int:
    """Size of the arena in bytes, before anything is allocated."""
    rows = num_slots * block_tokens
    return page_aligned(rows * 4) + sum(page_aligned(rows * spec.token_nbytes) for spec in specs)


class AuxArena:
    """Shared rows of all slots.

    Attributes:
        region: owned by this object; pass `region.fd` to the worker and to store processes.
        rows: per spec name, an array [num_slots * block_tokens, *shape] over the shared bytes.
        written_nbytes: of rows written through this object (`scatter`), counted where they are written.
    """

    def __init__(self, region: SharedRegion, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> None:
        self.region = region
        self.num_slots = num_slots
        self.block_tokens = block_tokens
        self.specs = tuple(specs)
        self.written_nbytes = 0
        count = num_slots * block_tokens
        self._tags: NDArray[np.uint32] = np.frombuffer(region.map, np.uint32, count)
        self.rows: dict[str, NDArray[np.generic]] = {}
        # of each spec: where its section begins, and what a slot takes there
        self._runs: list[tuple[int, int]] = []
        offset = page_aligned(count * 4)
        for spec in self.specs:
            flat = np.frombuffer(region.map, spec.dtype, count * int(np.prod(spec.shape)), offset)
            self.rows[spec.name] = flat.reshape(count, *spec.shape)
            self._runs.append((offset, block_tokens * spec.token_nbytes))
            offset += page_aligned(count * spec.token_nbytes)

    @classmethod
    def create(cls, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> AuxArena:
        """A new arena. Pages are touched lazily, by the runner that writes them. Raises OSError."""
        region = SharedRegion.create("aux", arena_nbytes(num_slots, block_tokens, specs))
        return cls(region, num_slots, block_tokens, specs)

    @classmethod
    def attach(cls, fd: int, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> AuxArena:
        """The arena behind a descriptor, which belongs to the result. Raises InvariantBroken if it is too small."""
        region = SharedRegion(fd, arena_nbytes(num_slots, block_tokens, specs))
        return cls(region, num_slots, block_tokens, specs)

    def scatter(
        self, index: NDArray[np.integer], generations: NDArray[np.integer], values: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Write whole rows: `index` [n] is slot * block_tokens + offset, `generations` [n] the use of each slot,
        `values[name]` [n, *shape] of the spec's dtype, for every spec. Tags are written last.

        Raises InvariantBroken, before anything is written, unless names, shapes and dtypes are exactly those of the
        specs: a row is valid for all of them or for none, so what was left out would be another use's bytes.
        """
        self._check(index, generations, values)
        for name, rows in values.items():
            self.rows[name][index] = rows
            self.written_nbytes += rows.nbytes
        self._tags[index] = generations

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
        # one of 0 is no use of a slot, a larger one would be cut to another use's
        if count and not 1 <= int(generations.min()) <= int(generations.max()) < 1 << 32:
            raise InvariantBroken(f"aux rows of generations {int(generations.min())} to {int(generations.max())}")
        # a negative one would count from the end, in another slot
        if count and not 0 <= int(index.min()) <= int(index.max()) < self.num_slots * self.block_tokens:
            raise InvariantBroken(
                f"aux rows {int(index.min())} to {int(index.max())} of {self.num_slots * self.block_tokens}"
            )

    def copy_rows(
        self, slot: int, generation: int, offset: int, count: int, into: Mapping[str, NDArray[np.generic]], at: int
    ) -> None:
        """Copy rows [offset, offset + count) of a slot to `into[name][at : at + count]`, for every name in it.

        Raises InvariantBroken, before anything is copied, if a row was not written for this generation.
        """
        self.check_written(slot, generation, offset, count)
        first = slot * self.block_tokens + offset
        last = first + count
        for name, rows in into.items():
            rows[at : at + count] = self.rows[name][first:last]

    def check_written(self, slot: int, generation: int, offset: int, count: int) -> None:
        """Raise InvariantBroken unless rows [offset, offset + count) of a slot were written for this use of it. Whoever
        copies rows, stores them or offers them to others asks first."""
        if not (0 <= slot < self.num_slots and offset >= 0 and 0 <= count <= self.block_tokens - offset):
            raise InvariantBroken(f"aux rows {offset} to {offset + count - 1} of slot {slot} of {self.num_slots}")
        first = slot * self.block_tokens + offset
        # 0 is what memory holds that nobody wrote; no use of a slot has it
        if not generation or not (self._tags[first : first + count] == generation).all():
            raise InvariantBroken(
                f"aux rows {offset} to {offset + count - 1} of slot {slot} were not written for generation "
                f"{generation}: the runner's capture missed them"
            )

    def parts(self, slot: int, region: int) -> tuple[Part, ...]:
        """Where the rows of a slot lie, a part for each spec; `region` is this region's number for the store."""
        return tuple([Part(region, offset + slot * nbytes, nbytes) for offset, nbytes in self._runs])

    def adopt(self, slot: int, generation: int, count: int | None = None) -> None:
        """The first `count` rows of a slot (None: all) came with their block, checked, for this use of the slot: from
        now on they count, and no others."""
        first = slot * self.block_tokens
        stop = first + (self.block_tokens if count is None else count)
        self._tags[first:stop] = generation
        self._tags[stop : first + self.block_tokens] = 0

    def close(self) -> None:
        """Drop the mapping and the fd; idempotent. The bytes live on while somebody holds a view of `rows`."""
        self._tags = np.empty(0, np.uint32)
        self.rows.clear()
        self.region.close()
