"""In which broadcasts the tensors of an update come. Pure; both sides compute it from the tensors' sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: of the first byte of each tensor in a bucket: enough for any dtype
ALIGN_NBYTES = 16
#: of the broadcast behind the last tensor
CHECKSUM_NBYTES = 16


class Bucket(NamedTuple):
    """One broadcast.

    Attributes:
        parts: (number, first byte in the broadcast) of each tensor in it.
        nbytes: of all of it.
        first: first byte in the tensor, of a piece of a large one, which is alone.
        whole: all bytes of its tensors are in it.
    """

    parts: tuple[tuple[int, int], ...]
    nbytes: int
    first: int = 0
    whole: bool = True


def buckets(sizes: Iterable[int], bucket_nbytes: int) -> Iterator[Bucket]:
    """The broadcasts, in order, of tensors of so many bytes each; see `GroupTensors.bucket_nbytes`. Each is given as
    soon as no more tensors fit into it."""
    most = bucket_nbytes // ALIGN_NBYTES * ALIGN_NBYTES
    parts: list[tuple[int, int]] = []
    filled = 0
    for number, nbytes in enumerate(sizes):
        at = (filled + ALIGN_NBYTES - 1) // ALIGN_NBYTES * ALIGN_NBYTES
        if parts and (at + nbytes > most or not most):
            yield Bucket(tuple(parts), filled)
            parts, at, filled = [], 0, 0
        if most and nbytes > most:
            # nothing is left in `parts`: it did not fit behind them
            for first in range(0, nbytes, most):
                yield Bucket(((number, 0),), min(most, nbytes - first), first, whole=False)
            continue
        parts.append((number, at))
        filled = at + nbytes
    if parts:
        yield Bucket(tuple(parts), filled)
