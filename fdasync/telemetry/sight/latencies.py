"""Histograms of seconds, in the same buckets for all engines, so that several engines' histograms add up.

Four buckets to each doubling, from 0.1 ms to half an hour: a quantile is right to a fifth of itself. Pure. Called by
`recorder.py`, and by readers of a `Sight`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST_S = 0.0001
_PER_DOUBLING = 4
#: number of buckets; the last one has no upper bound
NUM_BUCKETS = 97

#: (bucket, count) of each bucket that has some, in order
Counts = tuple[tuple[int, int], ...]


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    if seconds <= _FIRST_S:
        return 0
    return min(math.floor(math.log2(seconds / _FIRST_S) * _PER_DOUBLING), NUM_BUCKETS - 1)


def upper_s(bucket: int) -> float:
    """The upper bound of a bucket, in seconds; infinite for the last one."""
    return math.inf if bucket >= NUM_BUCKETS - 1 else float(_FIRST_S * 2.0 ** ((bucket + 1) / _PER_DOUBLING))


def added(parts: Iterable[Counts]) -> Counts:
    """The sum of histograms."""
    sums: dict[int, int] = {}
    for part in parts:
        for bucket, count in part:
            sums[bucket] = sums.get(bucket, 0) + count
    return tuple(sorted(sums.items()))


def total(counts: Counts) -> int:
    """How many durations a histogram has."""
    return sum([count for _, count in counts])


def quantile(counts: Counts, share: float) -> float | None:
    """Seconds that so large a share of the durations does not exceed; None: there are none. In the last bucket, its
    lower bound."""
    left = share * total(counts)
    if not counts:
        return None
    for bucket, count in counts:
        if left <= count:
            lower = _FIRST_S * 2 ** (bucket / _PER_DOUBLING)
            return float(lower * 2 ** (min(left / count, 1.0) / _PER_DOUBLING)) if bucket < NUM_BUCKETS - 1 else lower
        left -= count
    return upper_s(counts[-1][0] - 1)


class Histogram:
    """Counts durations.

    Attributes:
        sum_s: of all of them, in seconds.
    """

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts: dict[int, int] = {}

    def observe(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.sum_s += max(seconds, 0.0)

    @property
    def counts(self) -> Counts:
        return tuple(sorted(self._counts.items()))

    def since(self, before: Counts) -> Counts:
        """What came after `before`, which this histogram was."""
        known = dict(before)
        return tuple([(at, count - known.get(at, 0)) for at, count in self.counts if count > known.get(at, 0)])
