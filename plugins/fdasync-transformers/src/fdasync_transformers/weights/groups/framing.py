"""In which broadcasts the tensors of an update come. Pure; both sides compute it from the tensors' sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: of the first byte of each tensor in a bucket: enough for any dtype
ALIGN_NBYTES = 16
#: of the broadcast behind the last tensor
CHECKSUM_NBYTES = 16


class Bucket(NamedTuple):
    """One broadcast.

    Attributes:
        parts: (number, first byte) of each tensor in it.
        nbytes: of all of it.
    """

    parts: tuple[tuple[int, int], ...]
    nbytes: int


def buckets(sizes: Sequence[int], bucket_nbytes: int) -> list[Bucket]:
    """The broadcasts, in order, of tensors of so many bytes each; see `GroupTensors.bucket_nbytes`."""
    made: list[Bucket] = []
    parts: list[tuple[int, int]] = []
    filled = 0
    for number, nbytes in enumerate(sizes):
        at = (filled + ALIGN_NBYTES - 1) // ALIGN_NBYTES * ALIGN_NBYTES
        if parts and at + nbytes > bucket_nbytes:
            made.append(Bucket(tuple(parts), filled))
            parts, at = [], 0
        parts.append((number, at))
        filled = at + nbytes
    if parts:
        made.append(Bucket(tuple(parts), filled))
    return made
