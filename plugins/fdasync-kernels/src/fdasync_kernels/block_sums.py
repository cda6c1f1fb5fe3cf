"""Checksums of runs of bytes on a device, as `ipc/peers/sums.py` defines them: the same numbers, by a kernel.

Sums modulo 2^64 do not depend on how the work is cut. Knows flat memory and places in it, and no blocks. Called by
`gpu/peer_pool.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_WORD_NBYTES = 8
# of the numbers of words, and of the mix: as in `ipc/peers/sums.py`
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR = tl.constexpr(0xD6E8FEB86659FD93)
# words that a program reads at a time, and in all
_WIDE = 1024
_CHUNK = 8192


@triton.jit(do_not_specialize=["run_words", "first"])
def _sum(words, places, sums, run_words, first, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """A program adds up one chunk of one run."""
    run = tl.program_id(0)
    chunk = tl.program_id(1)
    base = words + tl.load(places + run)
    total = tl.zeros([WIDE], tl.uint64)
    for at in range(0, CHUNK, WIDE):
        offsets = chunk * CHUNK + at + tl.arange(0, WIDE)
        inside = offsets < run_words
        value = tl.load(base + offsets, mask=inside, other=0).to(tl.uint64, bitcast=True)
        value ^= (offsets + first).to(tl.uint64) * _STEP
        value ^= value >> 32
        value *= _FACTOR
        value ^= value >> 32
        value *= _FACTOR
        value ^= value >> 32
        total += tl.where(inside, value, tl.zeros([WIDE], tl.uint64))
    tl.store(sums + run * tl.num_programs(1) + chunk, tl.sum(total.to(tl.int64, bitcast=True), axis=0))


def run_sums(memory: torch.Tensor, places: torch.Tensor, nbytes: int, first_nbytes: int) -> torch.Tensor:
    """int64 [runs, chunks], whose rows add up, modulo 2^64, to the checksum of each run.

    Args:
        memory: int64 [words], contiguous; all runs lie in it.
        places: int64 [runs], the word of `memory` that each run begins at, on the same device.
        nbytes: of each run.
        first_nbytes: where in its block each run begins.

    Raises BadInput where runs are no whole words.
    """
    if nbytes % _WORD_NBYTES or first_nbytes % _WORD_NBYTES:
        raise BadInput("nbytes", f"{nbytes} bytes at {first_nbytes}", limit="whole words")
    words = nbytes // _WORD_NBYTES
    chunks = max(1, -(-words // _CHUNK))
    sums = torch.empty(len(places), chunks, dtype=torch.int64, device=memory.device)
    if len(places):
        _sum[len(places), chunks](memory, places, sums, words, first_nbytes // _WORD_NBYTES + 1, _CHUNK, _WIDE)
    return sums
