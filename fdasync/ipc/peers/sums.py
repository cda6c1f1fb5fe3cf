"""Checksums of KV blocks that any way of cutting a block into runs can be added up to, in numpy.

The checksum of a run is the sum, modulo 2^64, of a mix of each 64-bit word with the word's number in the whole block.
So the checksum of a block is the sum over its runs, however many processes hold a run each, and however a device cuts
the work. A word that differs always changes its own mix; words that moved change the sum. This guards against memory
that was used again too early, and against a copy that is not whole; it is no signature. A Triton kernel computes the
same numbers on a device (`fdasync_kernels/block_sums.py`). Called by pools in host memory, and by tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: of a word; runs begin and end at whole words
WORD_NBYTES = 8
#: 2^64 over the golden ratio: of the numbers of words
STEP = 0x9E3779B97F4A7C15
#: an odd factor that spreads differences over all bits
FACTOR = 0xD6E8FEB86659FD93
#: sums are modulo this
MODULUS = 1 << 64


def block_sums(runs: NDArray[np.uint8], first_nbytes: int = 0) -> NDArray[np.uint64]:
    """The checksum of each run, uint64 [runs]. `runs` is [runs, nbytes], contiguous inside of a run, and begins at byte
    `first_nbytes` of its blocks. Raises InvariantBroken where runs are no whole words."""
    count, nbytes = runs.shape
    if nbytes % WORD_NBYTES or first_nbytes % WORD_NBYTES:
        raise InvariantBroken(f"a run of {nbytes} bytes at {first_nbytes} of a block is not made of whole words")
    first = first_nbytes // WORD_NBYTES + 1
    numbers = np.arange(first, first + nbytes // WORD_NBYTES, dtype=np.uint64) * np.uint64(STEP)
    sums = np.zeros(count, np.uint64)
    half, factor = np.uint64(32), np.uint64(FACTOR)
    for place in range(count):
        words = np.ascontiguousarray(runs[place]).view(np.uint64) ^ numbers
        for _ in range(2):
            words ^= words >> half
            words *= factor
        words ^= words >> half
        sums[place] = words.sum(dtype=np.uint64)
    return sums


def added(sums: list[int]) -> int:
    """The checksum of a block from the checksums of its runs."""
    return sum(sums) % MODULUS
