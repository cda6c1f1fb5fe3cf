"""The host arena: the bytes of all aux slots, in one sealed memfd that engine and worker share.

Layout: a section of row tags, uint32 [num_slots, block_tokens], then one section per spec,
[num_slots, block_tokens, *shape], each section aligned to 4 KiB. A row's tag is the generation of the
slot's use that wrote it: a row counts only while its tag equals the generation asked for, so a row
that was never written, or was written for another use of the slot, is never returned (fail closed).

The runner writes (`scatter`), the engine reads (`copy_rows`); the receipt of `StepDone` orders the two.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec

_PAGE = 4096


def _align(nbytes: int) -> int:
    return (nbytes + _PAGE - 1) // _PAGE * _PAGE


def arena_nbytes(num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> int:
    """Size of the arena in bytes, before anything is allocated."""
    rows = num_slots * block_tokens
    return _align(rows * 4) + sum(_align(rows * spec.token_nbytes) for spec in specs)


class AuxArena:
    """Shared rows of all slots.

    Attributes:
        fd: the memfd; pass it to the worker. Owned by this object and closed by `close`.
        rows: per spec name, an array [num_slots * block_tokens, *shape] over the shared bytes.
    """

    def __init__(self, fd: int, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.block_tokens = block_tokens
        self.specs = tuple(specs)
        nbytes = arena_nbytes(num_slots, block_tokens, specs)
        if os.fstat(fd).st_size < nbytes:
            raise InvariantBroken(f"the arena has {os.fstat(fd).st_size} bytes, {nbytes} are needed")
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        count = num_slots * block_tokens
        self._tags: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, count)
        self.rows: dict[str, NDArray[np.generic]] = {}
        offset = _align(count * 4)
        for spec in self.specs:
            flat = np.frombuffer(self._map, spec.dtype, count * int(np.prod(spec.shape)), offset)
            self.rows[spec.name] = flat.reshape(count, *spec.shape)
            offset += _align(count * spec.token_nbytes)

    @classmethod
    def create(cls, num_slots: int, block_tokens: int, specs: Sequence[AuxSpec]) -> AuxArena:
        """A new arena. Pages are touched lazily, by the runner that writes them. Raises OSError."""
        fd = os.memfd_create("fdasync-aux", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, arena_nbytes(num_slots, block_tokens, specs))
            _seal(fd)
            return cls(fd, num_slots, block_tokens, specs)
        except BaseException:
            os.close(fd)
            raise

    def scatter(
        self, index: NDArray[np.integer], generations: NDArray[np.integer], values: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Write rows: `index` [n] is slot * block_tokens + offset, `generations` [n] the use of each slot,
        `values[name]` [n, *shape]. Tags are written last."""
        for name, rows in values.items():
            self.rows[name][index] = rows
        self._tags[index] = generations

    def copy_rows(
        self, slot: int, generation: int, offset: int, count: int, into: Mapping[str, NDArray[np.generic]], at: int
    ) -> None:
        """Copy rows [offset, offset + count) of a slot to `into[name][at : at + count]`, for every spec.

        Raises InvariantBroken, before anything is copied, if a row was not written for this generation.
        """
        first = slot * self.block_tokens + offset
        last = first + count
        # 0 is what memory holds that nobody wrote; no use of a slot has it
        if not generation or not (self._tags[first:last] == generation).all():
            raise InvariantBroken(
                f"aux rows {offset} to {offset + count - 1} of slot {slot} were not written for generation "
                f"{generation}: the runner's capture missed them"
            )
        for name, rows in self.rows.items():
            into[name][at : at + count] = rows[first:last]

    def close(self) -> None:
        """Drop the mapping and the fd; idempotent. The bytes live on while somebody holds a view of `rows`."""
        if self.fd < 0:
            return
        self._tags = np.empty(0, np.uint32)
        self.rows.clear()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
        self.fd = -1


def _seal(fd: int) -> None:
    import fcntl

    # a peer that could shrink the file could make the other side die of SIGBUS
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
