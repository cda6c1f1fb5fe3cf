"""The unit of masses: what a probability of 1 is as a whole number. Kernels and host must agree on it.

Imports neither torch nor triton.
"""

from __future__ import annotations

# a row's masses must add up in an int64, and float64 must hold one
_SUM_BITS, _MOST_BITS = 62, 52


def shift_of(width: int) -> int:
    """The power of two that is the mass of the largest logit of a row of `width` logits, before filters."""
    return min(_MOST_BITS, _SUM_BITS - width.bit_length())


def unit_of(width: int) -> float:
    """That mass."""
    return 2.0 ** shift_of(width)
