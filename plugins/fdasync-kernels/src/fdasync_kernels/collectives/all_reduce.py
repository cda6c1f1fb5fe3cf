"""Sums of a tensor over the devices of a group; each device writes into the memory of the others.

Every device launches the same kernel; its programs exchange tiles with the same programs of their peers
(`channel.py`). One shot: a program sends its tile to all, and adds up what it gets. Two shots: a program gets the tiles
of its device's part, adds them up, and sends the sum to all; with more than two devices that moves fewer bytes, and it
waits twice. Both add as one tree of neighbours, (0 + 1) + (2 + 3), in float32, and round once: all devices get the same
bits, by either way.

All programs of a launch must run at once, so a `Way` bounds their number. A device that waits for another that never
comes spins until its process is killed. Knows no models and no processes; `gpu/peers.py` maps the memory. Runs on CUDA;
under Triton's interpreter programs do not wait, and tests launch one device after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.collectives.channel import after, before, bits_of, empty, received, send, slots_of, summed
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.rounding import rounded

if TYPE_CHECKING:
    from fdasync_kernels.collectives.peer_memory import PeerMemory

# elements that are read at once, 16 bytes or more
VECTOR = 8
# from so many bytes on two shots are faster, where they send less: with more than two ranks (four H100, 1 to 8,192 rows
# of 4 KiB)
_TWO_SHOTS_FROM_NBYTES = 256 << 10


@triton.jit(do_not_specialize=["vectors"])
def _one_shot_kernel(
    x, out, addresses, turns, vectors,
    VECTOR: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    wait_for_inputs(OVERLAP)
    # the compiler sees that whole vectors are inside or outside
    count = vectors * VECTOR
    apart = tl.num_programs(0) * TILE
    element = tl.arange(0, TILE)
    turn = tl.load(turns + tl.program_id(0))
    for first in range(tl.program_id(0) * TILE, count, apart):
        at = first + element
        mask = at < count
        own = bits_of(tl.load(x + at, mask=mask, other=0.0))
        send(own, element, mask, addresses, turn, RANK, RANK, RANKS, RANKS, TILE, BITS)
        empty(slots_of(addresses, RANK, before(turn), 0, RANKS, TILE, BITS), RANK, RANKS, RANKS, TILE)
        bits = received(slots_of(addresses, RANK, turn, 0, RANKS, TILE, BITS), mask[None, :], RANK, RANKS, PLACES, TILE)
        turn = after(turn, first + apart < count)
        total = summed(bits, own, dtype, RANK, RANKS, PLACES)
        tl.store(out + at, rounded(total, dtype).to(dtype), mask=mask)
    tl.store(turns + tl.program_id(0), turn)


@triton.jit(do_not_specialize=["vectors"])
def _two_shot_kernel(
    x, out, addresses, turns, vectors,
    VECTOR: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rank r adds up the elements from r * part on; a program's tiles have the same places in every part. The first
    slots of a turn, one for each rank, are for tiles, the others for sums."""
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    SLOTS: tl.constexpr = 2 * RANKS
    wait_for_inputs(OVERLAP)
    count, part = vectors * VECTOR, tl.cdiv(vectors, RANKS) * VECTOR
    apart = tl.num_programs(0) * TILE
    element = tl.arange(0, TILE)
    turn = tl.load(turns + tl.program_id(0))
    for first in range(tl.program_id(0) * TILE, part, apart):
        at = first + element
        for distance in tl.static_range(1, RANKS):
            peer = (RANK + distance) % RANKS
            theirs = (at < part) & (at < count - part * peer)
            given = bits_of(tl.load(x + part * peer + at, mask=theirs, other=0.0))
            tl.store(slots_of(addresses, peer, turn, RANK, SLOTS, TILE, BITS) + element, given, mask=theirs)
        mask = (at < part) & (at < count - part * RANK)
        own = bits_of(tl.load(x + part * RANK + at, mask=mask, other=0.0))
        empty(slots_of(addresses, RANK, before(turn), 0, SLOTS, TILE, BITS), RANK, RANKS, SLOTS, TILE)
        bits = received(slots_of(addresses, RANK, turn, 0, SLOTS, TILE, BITS), mask[None, :], RANK, RANKS, PLACES, TILE)
        total = bits_of(rounded(summed(bits, own, dtype, RANK, RANKS, PLACES), dtype).to(dtype))
        send(total, element, mask, addresses, turn, RANKS + RANK, RANK, RANKS, SLOTS, TILE, BITS)
        rank = tl.arange(0, PLACES)[:, None]
        all_at = at[None, :]
        theirs = (all_at < part) & (all_at < count - part * rank)
        bits = received(slots_of(addresses, RANK, turn, RANKS, SLOTS, TILE, BITS), theirs, RANK, RANKS, PLACES, TILE)
        turn = after(turn, first + apart < part)
        tl.store(out + part * RANK + at, total.to(dtype, bitcast=True), mask=mask)
        tl.store(
            out + part * rank + all_at, bits.to(dtype, bitcast=True), mask=theirs & (rank != RANK) & (rank < RANKS)
        )
    tl.store(turns + tl.program_id(0), turn)


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
            of 8 elements.
        out: receives the sum, as `x`, which it may be; None: a new tensor.

    Raises:
        BadInput: another dtype, size, strides or alignment.
    """
    if out is None:
        out = torch.empty_like(x)
    for name, tensor in (("x", x), ("out", out)):
        if tensor.dtype not in FLOATS or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            problem = f"{tensor.dtype} with strides {tensor.stride()} from {tensor.data_ptr():#x} on"
            raise BadInput(name, problem, hint="contiguous and aligned bfloat16, float16 or float32")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise BadInput("out", f"{out.dtype} {tuple(out.shape)} for a sum of {x.dtype} {tuple(x.shape)}")
    if x.numel() % VECTOR:
        raise BadInput("x", f"{x.numel()} elements", limit=f"{VECTOR} each")
    vectors = x.numel() // VECTOR
    if not vectors:
        return out
    ranks = peers.ranks
    if way == "auto":
        way = "two_shot" if ranks > 2 and x.nbytes >= _TWO_SHOTS_FROM_NBYTES else "one_shot"
    count = (vectors if way == "one_shot" else triton.cdiv(vectors, ranks)) * VECTOR
    kernel = _one_shot_kernel if way == "one_shot" else _two_shot_kernel
    area = peers.areas[way]
    if count * x.element_size() > area.way.tile_nbytes * area.way.programs:
        area = peers.areas[f"{way}_wide"]
    tile = area.way.tile_nbytes // x.element_size()
    grid: Any = (min(area.way.programs, triton.cdiv(count, tile)),)
    kernel[grid](
        x, out, area.addresses, area.turns, vectors, VECTOR=VECTOR, TILE=tile, RANK=peers.rank, RANKS=ranks,
        PLACES=peers.places,        num_warps=area.way.warps,
        **overlap(x.device),
    )  # fmt: skip
    return out
