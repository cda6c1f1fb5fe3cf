"""Sums of floats that are not rounded, so that the order in which parts are added changes nothing.

Called by `mismatch.py`.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def exact_sum(values: NDArray[np.float64]) -> Fraction:
    """The sum of finite float64 values, not rounded."""
    if not values.size:
        return Fraction(0)
    fraction, exponent = np.frexp(values)
    # 53-bit integers, added in two halves so that 2**36 of them cannot overflow
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest = int(exponent.min())
    groups, where = np.unique(exponent, return_inverse=True)
    order = np.argsort(where, kind="stable")
    firsts = np.searchsorted(where[order], np.arange(groups.size))
    high = np.add.reduceat(whole[order] >> 27, firsts)
    low = np.add.reduceat(whole[order] & ((1 << 27) - 1), firsts)
    total = 0
    for group, above, below in zip(groups, high, low, strict=True):
        total += ((int(above) << 27) + int(below)) << (int(group) - lowest)
    return Fraction(total) * Fraction(2) ** (lowest - 53)


def exact(parts: tuple[float, ...]) -> Fraction:
    """The sum of what `parts_of` gave."""
    return sum((Fraction(part) for part in parts), Fraction(0))


def parts_of(value: Fraction) -> tuple[float, ...]:
    """Floats that add up to exactly this sum of floats, the same ones for the same sum."""
    parts = []
    while value:
        try:
            part = float(value)
        except OverflowError:  # several terms near the largest float
            part = sys.float_info.max
        parts.append(part)
        value -= Fraction(part)
    return tuple(parts)
