"""Sums of a tensor over the devices of a group, each of which reads the memory of the others.

Every device launches the same kernel. Its programs copy the tensor into memory that the peers map, wait for the same
program of every peer, and read what those wrote. One shot: every device adds up all of it. Two shots: every device adds
up its part, and gets the other parts from those that made them; that moves fewer bytes and waits twice. Both add in the
order of ranks, in float32, and round once: all devices get the same bits, by either way.

Programs wait for each other by flags in the peers' memory, so all programs of a launch must run at once: `PROGRAMS`
bounds their number. A device that waits for one that never comes spins until its process is killed. Two buffers are
used in turn: a device that is one sum ahead writes where its peers do not read. Knows no models and no processes;
`gpu/peers.py` maps the memory. Runs on CUDA; under Triton's interpreter programs do not wait, and tests launch one
device after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync.gpu.kernels.collectives.meeting import buffer_of, meet
from fdasync.gpu.kernels.collectives.peer_memory import PROGRAMS
from fdasync.gpu.kernels.limits import FLOATS
from fdasync.gpu.kernels.rounding import rounded

if TYPE_CHECKING:
    from fdasync.gpu.kernels.collectives.peer_memory import PeerMemory

# elements that a program takes at a time
_TILE = 2048
# elements that are read at once, 16 bytes or more
_VECTOR = 8
# bytes from which two shots are faster, times the number of ranks
_TWO_SHOTS_FROM_NBYTES = 256 << 10


@triton.jit  # type: ignore[untyped-decorator]
def _summed(buffers, at, mask, like, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over ranks of these elements of their buffers, in order, rounded once."""
    dtype: tl.constexpr = like.dtype.element_ty
    total = tl.zeros(at.shape, dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        # peers write this memory while the kernel runs: no cache of this multiprocessor may answer
        total += tl.load(buffer_of(buffers, rank, like) + at, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
    return rounded(total, dtype).to(dtype)


@triton.jit(do_not_specialize=["vectors"])  # type: ignore[untyped-decorator]
def _one_shot_kernel(  # type: ignore[no-untyped-def]
    x, out, buffers, flags, vectors, VECTOR: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    # the compiler sees that whole vectors are inside or outside
    count = vectors * VECTOR
    own = buffer_of(buffers, RANK, x)
    apart = tl.num_programs(0) * TILE
    for first in range(tl.program_id(0) * TILE, count, apart):
        at = first + tl.arange(0, TILE)
        tl.store(own + at, tl.load(x + at, mask=at < count), mask=at < count)
    meet(flags, RANK, RANKS)
    for first in range(tl.program_id(0) * TILE, count, apart):
        at = first + tl.arange(0, TILE)
        tl.store(out + at, _summed(buffers, at, at < count, x, RANKS), mask=at < count)


@triton.jit(do_not_specialize=["vectors"])  # type: ignore[untyped-decorator]
def _two_shot_kernel(  # type: ignore[no-untyped-def]
    x, out, buffers, flags, vectors, VECTOR: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Rank r adds up the elements from r * part on; a program's tiles have the same places in every part, so it waits
    for the same program of its peers alone. Sums stand in the buffers where the rank's own elements were."""
    count, part = vectors * VECTOR, tl.cdiv(vectors, RANKS) * VECTOR
    own = buffer_of(buffers, RANK, x)
    apart = tl.num_programs(0) * TILE
    for rank in tl.static_range(RANKS):
        end = tl.minimum(part * (rank + 1), count)
        for first in range(part * rank + tl.program_id(0) * TILE, end, apart):
            at = first + tl.arange(0, TILE)
            tl.store(own + at, tl.load(x + at, mask=at < end), mask=at < end)
    meet(flags, RANK, RANKS)
    end = tl.minimum(part * (RANK + 1), count)
    for first in range(part * RANK + tl.program_id(0) * TILE, end, apart):
        at = first + tl.arange(0, TILE)
        total = _summed(buffers, at, at < end, x, RANKS)
        # no peer reads this part of this buffer before the next meeting
        tl.store(own + at, total, mask=at < end)
        tl.store(out + at, total, mask=at < end)
    meet(flags, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = buffer_of(buffers, rank, x)
            end = tl.minimum(part * (rank + 1), count)
            for first in range(part * rank + tl.program_id(0) * TILE, end, apart):
                at = first + tl.arange(0, TILE)
                total = tl.load(theirs + at, mask=at < end, cache_modifier=".cv")
                tl.store(out + at, total, mask=at < end)


def all_reduce(
    x: torch.Tensor,
    peers: PeerMemory,
    *,
    out: torch.Tensor | None = None,
    way: Literal["auto", "one_shot", "two_shot"] = "auto",
) -> torch.Tensor:
    """The sum of `x` over all ranks of a group, with the same bits on each.

    One launch on the current stream, without synchronising; may be captured in a CUDA graph. Every rank calls it with
    the same shape, dtype and way, in the same order; a rank that does not come leaves the others spinning.

    Args:
        x: bfloat16, float16 or float32, contiguous from a multiple of 16 bytes on, on the device of `peers`, a multiple
            of 8 elements and at most `peers.buffer_nbytes` bytes.
        out: receives the sum, as `x`, which it may be; None: a new tensor.

    Raises:
        BadInput: another dtype, size, strides or alignment, or more bytes than a buffer has.
    """
    if out is None:
        out = torch.empty_like(x)
    for name, tensor in (("x", x), ("out", out)):
        if tensor.dtype not in FLOATS or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            problem = f"{tensor.dtype} with strides {tensor.stride()} from {tensor.data_ptr():#x} on"
            raise BadInput(name, problem, hint="contiguous and aligned bfloat16, float16 or float32")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise BadInput("out", f"{out.dtype} {tuple(out.shape)} for a sum of {x.dtype} {tuple(x.shape)}")
    if x.nbytes > peers.buffer_nbytes or x.numel() % _VECTOR:
        raise BadInput("x", f"{x.numel()} elements", limit=f"{_VECTOR} each, {peers.buffer_nbytes} bytes in all")
    vectors = x.numel() // _VECTOR
    if not vectors:
        return out
    if way == "auto":
        way = "two_shot" if x.nbytes * peers.ranks >= _TWO_SHOTS_FROM_NBYTES else "one_shot"
    apart = vectors if way == "one_shot" else triton.cdiv(vectors, peers.ranks)
    grid: Any = (min(PROGRAMS, triton.cdiv(apart * _VECTOR, _TILE)),)
    kernel = _one_shot_kernel if way == "one_shot" else _two_shot_kernel
    kernel[grid](
        x, out, peers.next_buffers(), peers.flags, vectors,
        VECTOR=_VECTOR, TILE=_TILE, RANK=peers.rank, RANKS=peers.ranks, num_warps=8,
    )  # fmt: skip
    return out
