"""The end of a block and the beginning of the next one: sums, the residual stream and RMSNorm, in one kernel.

A block's output (a row, or the parts of its experts, with the output of shared experts) is added to the residual
stream; the result is stored, and its norm too, which the next block reads. The kernel rounds to the tensors' dtype
wherever the library's separate operations do. A row is one program of one fixed tile at every number of tokens, so its
bits depend on that row alone. The output may be summed over the ranks of a group on the way: programs exchange their
rows with the peers' programs then (`collectives/channel.py`), and the bits are as by `all_reduce` and this kernel
behind it. Knows no models. Called by the fused layers of a plugin. Runs on CUDA, or on the CPU in Triton's interpreter
(tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.collectives.channel import before as turn_before
from fdasync_kernels.collectives.channel import bits_of, empty, next_turn, received, send, slots_of, summed
from fdasync_kernels.collectives.peer_memory import row_width
from fdasync_kernels.layer.norm import warps_of
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

if TYPE_CHECKING:
    from fdasync_kernels.collectives.peer_memory import PeerMemory

_WIDEST = 16384


class Norm(NamedTuple):
    """An RMSNorm.

    Attributes:
        weight: [H].
        eps: added to the mean square.
        rounds_once: it rounds after the weight; else before and after it.
    """

    weight: torch.Tensor
    eps: float
    rounds_once: bool = False


# shapes and strides of a model never change; the number of tokens is the grid
@triton.jit(do_not_specialize_on_alignment=["ids", "live"])
def _finish(
    block, ids, live, shared, gate, residual, hidden, normed, weight, addresses, turns,
    block_row, block_slot, shared_row, residual_row,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, MASKED: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, NORMED: tl.constexpr, ONCE: tl.constexpr,
    EPS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = block.dtype.element_ty
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    if NORMED:
        # a weight of the model is there before the kernels before this one have ended
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    # what is behind the sums is read before them: it would wait for them
    if ADDED:
        before = tl.load(residual + row * residual_row + at, mask=inside, other=0.0).to(tl.float32)
    if SLOTS:
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        owned = 0
        if MASKED:
            owned = tl.load(live + row)
        for slot in tl.static_range(SLOTS):
            expert = tl.load(ids + row * SLOTS + slot)
            # other parts are undefined memory: they are read, so that no read waits for an id, and dropped
            part = tl.load(block + row * block_row + slot * block_slot + at, mask=inside, other=0.0).to(tl.float32)
            count = tl.where((expert >= 0) & (expert < EXPERTS) & (owned >= 0), SIZE, 0)
            total += tl.where(at < count, part, 0.0)
        total = rounded(total, dtype)
    else:
        total = tl.load(block + row * block_row + at, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        more = tl.load(shared + row * shared_row + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            share = tl.sigmoid(tl.load(gate + row).to(tl.float32))
            more = rounded(rounded(share, dtype) * more, dtype)
        total = rounded(total + more, dtype)
    if RANKS > 1:
        BITS: tl.constexpr = dtype.primitive_bitwidth
        own = bits_of(total.to(dtype))
        turn = tl.load(turns + tl.program_id(0))
        send(own, at, inside, addresses, turn, RANK, RANK, RANKS, RANKS, WIDTH, BITS)
        empty(slots_of(addresses, RANK, turn_before(turn), 0, RANKS, WIDTH, BITS), RANK, RANKS, RANKS, WIDTH)
        bits = received(
            slots_of(addresses, RANK, turn, 0, RANKS, WIDTH, BITS), inside[None, :], RANK, RANKS, PLACES, WIDTH
        )
        total = rounded(summed(bits, own, dtype, RANK, RANKS, PLACES), dtype)
        tl.store(turns + tl.program_id(0), next_turn(turn))
    if ADDED:
        total = rounded(before + total, dtype)
        tl.store(hidden + row * SIZE + at, total.to(dtype), mask=inside)
    if NORMED:
        scale = tl.rsqrt(tl.div_rn(tl.sum(total * total), SIZE + 0.0) + EPS)
        value = total * scale
        if not ONCE:
            value = rounded(value, dtype)
        value = rounded(factor * value, dtype)
        tl.store(normed + row * SIZE + at, value.to(dtype), mask=inside)


@overload
def add_norm(
    block: torch.Tensor, /, residual: torch.Tensor, norm: Norm, *, peers: PeerMemory | None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def add_norm(
    block: torch.Tensor, /, residual: torch.Tensor, norm: Norm | None, *, peers: PeerMemory | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
@operation
def add_norm(
    block: torch.Tensor, residual: torch.Tensor, norm: Norm | None, *, peers: PeerMemory | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add a block's output to the residual stream: the stream [T, H], and its norm [T, H] (None without one).

    Args:
        block: [T, H] float32, bfloat16 or float16; rows may be strided. Read.
        residual: likewise, of the same dtype. Read.
        norm: of the next block.
        peers: of the ranks over which `block` is summed first, as `all_reduce` does; it must take that many rows
            (`takes_rows`), and every rank makes the same call. None: it is not summed.

    Both results are new tensors. One launch on the current stream, without synchronising; a CUDA graph can hold it, and
    T compiles nothing anew. Raises BadInput for shapes, strides and dtypes that the kernel does not take.
    """
    return _launch(block, residual, norm, peers=peers)


@operation
def norm_rows(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMSNorm of rows [T, H], a new tensor: the bits of `add_norm`. Otherwise as that."""
    normed = _launch(x, None, norm)[1]
    assert normed is not None
    return normed


@operation
def finish_experts(
    parts: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    live: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    peers: PeerMemory | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum the parts of each token's experts and add them to the residual stream; otherwise as `add_norm`.

    The sum runs in slot order in float32 and is rounded once; the shared experts' output is added to it before the
    residual stream is.

    Args:
        parts: [T, k, H], times their routing weights; a token's parts and their elements may be strided apart, the
            elements of a part may not. Parts of ids outside of [0, num_experts) may hold anything.
        ids: [T, k] int64 or int32, contiguous.
        num_experts: ids below it have parts.
        residual: [T, H].
        norm: of the next block.
        live: int64 [T]; parts of rows whose entry is negative may hold anything. None: all rows have parts.
        shared: [T, H], of shared experts; None: there are none.
        shared_gate: [T] or [T, 1], contiguous: logits of the sigmoid that `shared` is multiplied with.
        peers: as `add_norm` has them; what is summed is the sum of parts and shared experts.
    """
    known = ids.dtype in (torch.int64, torch.int32)
    if parts.dim() != 3 or ids.shape != parts.shape[:2] or not ids.is_contiguous() or not known:
        problem = f"{tuple(parts.shape)} with ids {ids.dtype} {tuple(ids.shape)}: not [tokens, k, size], [tokens, k]"
        raise BadInput("parts", problem)
    if live is not None and (live.shape != ids.shape[:1] or live.dtype is not torch.int64 or not live.is_contiguous()):
        raise BadInput("live", f"{live.dtype} {tuple(live.shape)} where int64 [{len(ids)}] was expected")
    return _launch(parts, residual, norm, ids, num_experts, live, shared, shared_gate, peers)


def _launch(
    block: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm | None,
    ids: torch.Tensor | None = None,
    num_experts: int = 0,
    live: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    peers: PeerMemory | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, size = block.shape[0], block.shape[-1]
    if not 1 <= size <= _WIDEST:
        raise BadInput("block", f"rows of {size} elements", limit=_WIDEST)
    for name, other in (("shared", shared), ("residual", residual)):
        if other is not None and (other.shape != (rows, size) or other.dtype != block.dtype or other.stride(1) != 1):
            raise BadInput(name, f"{other.dtype} {tuple(other.shape)} beside {block.dtype} {tuple(block.shape)}")
    if block.dtype not in FLOATS:
        raise BadInput("block", f"{block.dtype} is no dtype of rows")
    if block.stride(-1) != 1:
        raise BadInput("block", "the elements of a row do not lie beside each other")
    if gate is not None and (gate.numel() != rows or not gate.is_contiguous()):
        raise BadInput("shared_gate", f"shape {tuple(gate.shape)} where [{rows}] was expected")
    if norm is not None and (norm.weight.numel() != size or not norm.weight.is_contiguous()):
        raise BadInput("norm", f"a weight of {norm.weight.numel()} elements", limit=size)
    hidden = block if residual is None else torch.empty((rows, size), dtype=block.dtype, device=block.device)
    normed = None if norm is None else torch.empty((rows, size), dtype=block.dtype, device=block.device)
    if not rows:
        return hidden, normed
    # the shape in which `norm.py` sums a row, so that the bits are its
    width = row_width(size)
    area = None
    if peers is not None:
        if not peers.takes_rows(rows, width * block.element_size()):
            raise BadInput("peers", f"{rows} rows of {size} {block.dtype}, which they do not take")
        area = peers.areas["rows"]
    grid: Any = (rows,)
    _finish[grid](
        block,
        # where something is absent any pointer does: that kernel has no instruction for it
        block if ids is None else ids,
        block if live is None else live,
        block if shared is None else shared,
        block if gate is None else gate,
        block if residual is None else residual,
        hidden,
        block if normed is None else normed,
        block if norm is None else norm.weight,
        block if area is None else area.addresses,
        block if area is None else area.turns,
        # the stride of a single row may be anything in torch, and another kind of number compiles another kernel
        block.stride(0) if rows > 1 else size,
        block.stride(1) if ids is not None else 0,
        0 if shared is None else shared.stride(0) if rows > 1 else size,
        0 if residual is None else residual.stride(0) if rows > 1 else size,
        SIZE=size,
        WIDTH=width,
        SLOTS=0 if ids is None else ids.shape[1],
        EXPERTS=num_experts,
        MASKED=live is not None,
        SHARED=shared is not None,
        GATED=gate is not None,
        ADDED=residual is not None,
        NORMED=norm is not None,
        ONCE=norm is not None and norm.rounds_once,
        EPS=0.0 if norm is None else norm.eps,
        RANK=0 if peers is None else peers.rank,
        RANKS=1 if peers is None else peers.ranks,
        PLACES=1 if peers is None else peers.places,
        # the library's products and sums are operations of their own, so none may be joined
        num_warps=warps_of(width, block.element_size()),
        enable_fp_fusion=False,
        **overlap(block.device),
    )
    return hidden, normed
