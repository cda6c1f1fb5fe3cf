"""Short messages of all devices of a group on each of them, by one launch and without the host.

Each device writes its message to memory that the peers map, waits for theirs, and reads them. See `all_reduce.py` for
what waiting means, and for the interpreter. Knows no models and no processes; `gpu/peers.py` maps the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync.gpu.kernels.collectives.meeting import buffer_of, meet

if TYPE_CHECKING:
    from fdasync.gpu.kernels.collectives.peer_memory import PeerMemory

# elements that the program takes at a time
_TILE = 1024


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    x, out, buffers, flags, count, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    own = buffer_of(buffers, RANK, x)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        tl.store(own + at, tl.load(x + at, mask=at < count), mask=at < count)
    meet(flags, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        theirs = buffer_of(buffers, rank, x)
        for first in range(0, count, TILE):
            at = first + tl.arange(0, TILE)
            # peers write this memory while the kernel runs: no cache of this multiprocessor may answer
            given = tl.load(theirs + at, mask=at < count, cache_modifier=".cv")
            tl.store(out + rank * count + at, given, mask=at < count)


def gather(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """The tensors of all ranks, in their order: int32 [ranks, n], new.

    One launch of one program on the current stream, without synchronising. Every rank calls it with the same number of
    elements, in the same order as its other collectives; a rank that does not come leaves the others spinning.

    Args:
        x: int32 [n], contiguous, on the device of `peers`, at most `peers.buffer_nbytes` bytes.

    Raises:
        BadInput: another dtype or shape, or more bytes than a buffer has.
    """
    if x.dtype is not torch.int32 or x.dim() != 1 or not x.is_contiguous():
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)} where contiguous int32 [n] was expected")
    if x.nbytes > peers.buffer_nbytes:
        raise BadInput("x", f"{x.nbytes} bytes", limit=peers.buffer_nbytes)
    out = torch.empty((peers.ranks, len(x)), dtype=torch.int32, device=x.device)
    _gather_kernel[(1,)](
        x, out, peers.next_buffers(), peers.flags, len(x),
        TILE=_TILE, RANK=peers.rank, RANKS=peers.ranks, num_warps=4,
    )  # fmt: skip
    return out
