"""How programs of a launch on several devices send each other tiles: what is sent is its own sign that it has come.

A program stores its tile in a slot of the peer's memory, and the peer reads that slot until no element of it is `EMPTY`
any more: one way over the link, without flags and fences. EMPTY is all bits set; of floating point that is one of many
NaNs, and a tile that holds it sends another NaN.

A slot must be empty again before it is written again. A channel has slots for three turns. In turn t a program reads
the slots of t; a peer may be a turn ahead and write the slots of t + 1. No peer is two turns ahead, since for that it
would need this program's tile of t + 1. So in turn t the slots of t - 1, used again in t + 2, have been read and are
not yet written: they are emptied then.

Under Triton's interpreter programs do not wait, and tests launch one device after another. Called by the kernels of
this room, and by `layer/finish.py`.
"""

import triton
import triton.language as tl

from fdasync_kernels.collectives.peer_memory import TURNS

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# of a channel, as in `peer_memory.py`
_TURNS: tl.constexpr = tl.constexpr(TURNS)


@triton.jit
def slots_of(
    addresses, rank: tl.constexpr, turn, first: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Where the slots of this program's channel begin in the memory of a rank, from the first one on: a pointer to
    integers of BITS bits. A turn has SLOTS slots of TILE elements."""
    kind: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
    area = tl.load(addresses + rank).to(tl.pointer_type(kind))
    place = (tl.program_id(0) * _TURNS + turn) * SLOTS + first
    return tl.multiple_of(area, 16) + place * TILE


@triton.jit
def send(
    bits, at, mask, addresses, turn, slot: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store a tile in this slot of every peer, the next rank's first."""
    for distance in tl.static_range(1, RANKS):
        peer = (RANK + distance) % RANKS
        tl.store(slots_of(addresses, peer, turn, slot, SLOTS, TILE, BITS) + at, bits, mask=mask)


@triton.jit
def bits_of(value):
    """Floating point as integers of its size; none is EMPTY."""
    kind: tl.constexpr = tl.int32 if value.dtype.primitive_bitwidth == 32 else tl.int16
    most: tl.constexpr = 0x7FFFFFFF if value.dtype.primitive_bitwidth == 32 else 0x7FFF
    bits = value.to(kind, bitcast=True)
    # another NaN
    return tl.where(bits == -1, most, bits).to(kind)


@triton.jit
def received(slots, mask, RANK: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr):
    """The elements [PLACES, TILE] of the slots of all ranks, once all of them have come; 0 in the row of this rank, in
    rows behind the last rank, and outside of the mask, [1, TILE] or [PLACES, TILE]. PLACES: see `Group`."""
    rank = tl.arange(0, PLACES)[:, None]
    at = rank * TILE + tl.arange(0, TILE)[None, :]
    here = (rank != RANK) & (rank < RANKS) & mask
    bits = tl.load(slots + at, mask=here, other=0, volatile=True)
    if not _INTERPRETED:
        while tl.max(tl.max((bits == -1).to(tl.int32), axis=0), axis=0) > 0:
            bits = tl.load(slots + at, mask=here, other=0, volatile=True)
    return bits


@triton.jit
def summed(bits, own, dtype: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr):
    """The sum as a tree of neighbours, float32 [TILE], of what was received and this rank's own bits [TILE]:
    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)); without those behind the last rank."""
    rank = tl.arange(0, PLACES)[:, None]
    parts = tl.where(rank == RANK, own[None, :], bits).to(dtype, bitcast=True).to(tl.float32)
    total = _pair(parts, rank, 0, RANKS)
    if RANKS > 2:
        total += _pair(parts, rank, 2, RANKS)
    if RANKS > 4:
        more = _pair(parts, rank, 4, RANKS)
        if RANKS > 6:
            more += _pair(parts, rank, 6, RANKS)
        total += more
    return total


@triton.jit
def _pair(parts, rank, first: tl.constexpr, RANKS: tl.constexpr):
    # of one number and zeros: the number
    total = tl.sum(tl.where(rank == first, parts, 0.0), axis=0)
    if first + 1 < RANKS:
        total += tl.sum(tl.where(rank == first + 1, parts, 0.0), axis=0)
    return total


@triton.jit
def empty(slots, RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Empty the slots of the turn before; this rank's own are never filled."""
    at = tl.arange(0, TILE)
    for slot in tl.static_range(SLOTS):
        if slot % RANKS != RANK:
            tl.store(slots + slot * TILE + at, tl.full((TILE,), -1, slots.dtype.element_ty))


@triton.jit
def before(turn):
    """The turn before this one."""
    return tl.where(turn == 0, _TURNS - 1, turn - 1)


@triton.jit
def after(turn, more):
    """The next turn. more: it is one of this launch; what was emptied is empty for all before anything is sent then.

    Called as soon as all has been received: what this program sent and emptied has come to its place by then, and only
    what it stores later would make it wait.
    """
    if not _INTERPRETED:
        turn = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $2, 0; @p fence.acq_rel.sys; mov.b32 $0, $1;}", "=r,r,r",
            [turn, more.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return next_turn(turn)


@triton.jit
def next_turn(turn):
    """As `after`, for a launch that ends with this turn."""
    return tl.where(turn == _TURNS - 1, 0, turn + 1)
