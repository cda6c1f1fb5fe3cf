"""Short messages of all devices of a group on each of them, by one launch and without the host.

Each device writes its message into the memory of the others (`channel.py`), and reads what they wrote. A number travels
as two halves, which are never what marks an empty slot. What waiting means, and the interpreter: see `all_reduce.py`.
Knows no models and no processes; `gpu/peers.py` maps the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.collectives.channel import after, before, empty, received, send, slots_of

if TYPE_CHECKING:
    from fdasync_kernels.collectives.peer_memory import PeerMemory


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    x,
    out,
    addresses,
    turns,
    count,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """A slot has TILE halves, the lower and the higher one of a number beside each other."""
    half = tl.arange(0, TILE)
    turn = tl.load(turns)
    for first in range(0, count, TILE // 2):
        at = first + half // 2
        mask = at < count
        number = tl.load(x + at, mask=mask, other=0)
        given = tl.where(half % 2 == 0, number, number >> 16) & 0xFFFF
        send(given, half, mask, addresses, turn, RANK, RANK, RANKS, RANKS, TILE, 32)
        empty(slots_of(addresses, RANK, before(turn), 0, RANKS, TILE, 32), RANK, RANKS, RANKS, TILE)
        theirs = received(slots_of(addresses, RANK, turn, 0, RANKS, TILE, 32), mask[None, :], RANK, RANKS, PLACES, TILE)
        rank = tl.arange(0, PLACES)[:, None]
        halves = tl.where(rank == RANK, given[None, :], theirs).to(tl.int16)
        # beside each other in `out`, too
        tl.store(out + (rank * count + first) * 2 + half[None, :], halves, mask=mask[None, :] & (rank < RANKS))
        turn = after(turn, first + TILE // 2 < count)
    tl.store(turns, turn)


def gather(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """The tensors of all ranks, in their order: int32 [ranks, n], new.

    One launch of one program on the current stream, without synchronising. Every rank calls it with the same number of
    elements, in the same order as its other collectives; a rank that does not come leaves the others spinning.

    Args:
        x: int32 [n], contiguous, on the device of `peers`.

    Raises:
        BadInput: another dtype or shape.
    """
    if x.dtype is not torch.int32 or x.dim() != 1 or not x.is_contiguous():
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)} where contiguous int32 [n] was expected")
    out = torch.empty((peers.ranks, len(x)), dtype=torch.int32, device=x.device)
    area = peers.areas["message"]
    if len(x):
        _gather_kernel[(1,)](
            x, out.view(torch.int16), area.addresses, area.turns, len(x),
            TILE=area.way.tile_nbytes // 4, RANK=peers.rank, RANKS=peers.ranks, PLACES=peers.places,
            num_warps=area.way.warps,
        )  # fmt: skip
    return out
