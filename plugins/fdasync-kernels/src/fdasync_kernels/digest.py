"""Digests of rows on a device: numbers that differ where any byte does, but for one chance in four billion.

The ranks of a group compare them at the end of each step. Knows rows as bytes. Runs on CUDA, and under Triton's
interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

# programs; each has its own tiles of the bytes
_PROGRAMS = 32
#: numbers of a digest: the salt, and one of each program
PARTS = 1 + _PROGRAMS
# bytes that a program takes at a time
_TILE = 2048
# offsets have 31 bits, that behind a program's last tile included
_MOST_NBYTES = (1 << 31) - 1 - _PROGRAMS * _TILE


@triton.jit(do_not_specialize=["nbytes", "salt"])
def _digest_kernel(rows, out, nbytes, salt, TILE: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((TILE,), dtype=tl.uint32)
    for first in range(program * TILE, nbytes, tl.num_programs(0) * TILE):
        at = first + tl.arange(0, TILE)
        byte = tl.load(rows + at, mask=at < nbytes, other=0).to(tl.uint32)
        # one-to-one in the byte: a single change never goes unseen
        mixed = at.to(tl.uint32) * 0x9E3779B1 + byte * 0x85EBCA77
        mixed = (mixed ^ (mixed >> 15)) * 0xC2B2AE3D
        mixed = (mixed ^ (mixed >> 13)) * 0x27D4EB2F
        mixed = mixed ^ (mixed >> 16)
        total += tl.where(at < nbytes, mixed, 0)
    tl.store(out + 1 + program, tl.sum(total, axis=0).to(tl.uint32).to(tl.int32, bitcast=True))
    if program == 0:
        tl.store(out, salt)


def digest_rows(rows: torch.Tensor | None, out: torch.Tensor, salt: int) -> None:
    """Write `salt` and the digest of the bytes of `rows`; one launch on the current stream, no synchronising.

    Args:
        rows: contiguous, 64 KiB less than 2 GiB at most, on the device of `out`; None: no bytes.
        out: int32 [PARTS], contiguous. Written.
        salt: the first number; its lower 31 bits.

    Raises:
        BadInput: another shape or dtype, or rows that are not contiguous or too many.
    """
    if out.dtype is not torch.int32 or tuple(out.shape) != (PARTS,) or not out.is_contiguous():
        raise BadInput("out", f"{out.dtype} {tuple(out.shape)} where contiguous int32 [{PARTS}] was expected")
    if rows is not None and (not rows.is_contiguous() or rows.nbytes > _MOST_NBYTES):
        problem = f"{rows.nbytes} bytes with strides {rows.stride()}"
        raise BadInput("rows", problem, limit=_MOST_NBYTES, hint="contiguous rows, in parts where there are more")
    nbytes = 0 if rows is None else rows.nbytes
    given = out if rows is None or not nbytes else rows
    _digest_kernel[(_PROGRAMS,)](
        given.view(-1).view(torch.uint8), out, nbytes, salt & 0x7FFFFFFF, TILE=_TILE, num_warps=4
    )
