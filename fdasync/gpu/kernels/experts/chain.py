"""The experts of a MoE layer in four launches: group, gate and up with the activation, down, sum of the slots.

A library runs some twenty kernels for this. Here pairs (token, slot) are grouped by expert without padding in memory;
`_experts_gate_up` gathers the rows of its tile, makes both products and the activation, and writes rows in grouped
order; `_experts_down` makes the second product, times the routing weight, and writes each pair's part to the pair's own
place; `_experts_combine` sums a token's parts in the order of its slots. Few pairs are not grouped: each is a tile.

Nothing is added atomically, no product is split over its inner dimension, and every tile walks that dimension in order.
So the bits of a token depend on its own row, ids and weights alone, not on the tiles nor on the tokens beside it. Every
id in range is computed: there is no capacity. Ids out of range, and rows that are nobody's, read no weights.

Knows no models and no routing. The tiles come from `tiles.py`, the activations from `activation.py`.
Called by the plugins' fused experts. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync.gpu.kernels.experts.activation import Activation, activate
from fdasync.gpu.kernels.experts.tiles import choose_tiles
from fdasync.gpu.kernels.overlap import overlap, wait_for_inputs

if TYPE_CHECKING:
    from fdasync.gpu.kernels.experts.tiles import Tile, Tiles

_MOST_EXPERTS = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SILU = Activation("silu")


@triton.jit(do_not_specialize=["pairs", "capacity"])  # type: ignore[untyped-decorator]
def _experts_group(  # type: ignore[no-untyped-def]
    ids, live, order, tiles, pairs, capacity,
    TOPK: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes one expert: counts all pairs, then ranks its own. `tiles` gets (expert, first row, rows)."""
    wait_for_inputs(OVERLAP)
    e = tl.program_id(0)
    expert = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < pairs
        found = tl.load(ids + pair, mask=inside, other=-1).to(tl.int32)
        good = inside & (found >= 0) & (found < E)
        if MASKED:
            good = good & (tl.load(live + pair // TOPK, mask=inside, other=-1) >= 0)
        counts += tl.histogram(tl.where(good, found, 0), EP, mask=good)
    before = tl.sum(tl.where(expert < e, counts, 0))
    mine = tl.sum(tl.where(expert == e, counts, 0))
    needed = (counts + BM - 1) // BM
    first = tl.sum(tl.where(expert < e, needed, 0))
    number = tl.arange(0, 32)
    for start in range(0, (mine + BM - 1) // BM, 32):
        at = start + number
        real = at * BM < mine
        place = tiles + (first + at) * 4
        tl.store(place, e + at * 0, mask=real)
        tl.store(place + 1, before + at * BM, mask=real)
        tl.store(place + 2, tl.minimum(BM, mine - at * BM), mask=real)
    for at in range(tl.sum(needed) + e, capacity, E):
        tl.store(tiles + at * 4, -1)
    rank = before
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < pairs
        hit = tl.load(ids + pair, mask=inside, other=-1).to(tl.int32) == e
        if MASKED:
            hit = hit & (tl.load(live + pair // TOPK, mask=inside, other=-1) >= 0)
        ones = hit.to(tl.int32)
        tl.store(order + rank + tl.cumsum(ones, 0) - ones, pair, mask=hit)
        rank += tl.sum(ones)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_of(tiles, ids, live, tile, TOPK: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile; -1: nothing to do. SINGLE: the tile is one pair."""
    if SINGLE:
        found = tl.load(ids + tile).to(tl.int32)
        if MASKED:
            found = tl.where(tl.load(live + tile // TOPK) >= 0, found, -1)
        return tl.where(found < E, found, -1)
    else:
        return tl.load(tiles + tile * 4)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(tiles, order, tile, BM: tl.constexpr, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile's rows: their places in grouped order, their pairs, and which are real; others repeat the first."""
    row = tl.arange(0, BM)
    if SINGLE:
        return tile + row * 0, tile + row * 0, row < 1
    else:
        first = tl.load(tiles + tile * 4 + 1)
        real = row < tl.load(tiles + tile * 4 + 2)
        place = first + tl.where(real, row, 0)
        return place, tl.load(order + place), real


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    w, base, row, k, wn, wk, rows, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr
):
    """Weights of output rows `row` and inner places `k`: [rows, k] with SWAP, else [k, rows]. Zeros past the ends."""
    if SWAP:
        at = w + base + row[:, None].to(tl.int64) * wn + k[None, :] * wk
        inside = (row < rows)[:, None] & (k < K)[None, :]
    else:
        at = w + base + row[None, :].to(tl.int64) * wn + k[:, None] * wk
        inside = (row < rows)[None, :] & (k < K)[:, None]
    if EVEN_N and EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _times(left, right, sums, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + left @ right in float32, in order; WIDEN: for the interpreter, which takes bfloat16 for its bits."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit(do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def _experts_gate_up(  # type: ignore[no-untyped-def]
    x, w, bias, out, order, tiles, ids, live, alpha, limit,
    x_row, w_expert, wn, wk, bias_expert,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, INTERLEAVED: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the activation for one tile of pairs; `out` is in grouped order."""
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(0) // COLUMNS
    e = _expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = _rows_of(tiles, order, tile, BM, SINGLE)
    token = (pair // TOPK).to(tl.int64)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    gate_row = column * 2 if INTERLEAVED else column
    up_row = column * 2 + 1 if INTERLEAVED else N + column
    # rows of the gate past its end are masked by the gate's end, those of the up half by the whole
    base = e.to(tl.int64) * w_expert
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    gate = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    up = gate
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if SWAP:
            at = x + token[None, :] * x_row + k[:, None]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[:, None], other=0.0)
        else:
            at = x + token[:, None] * x_row + k[None, :]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[None, :], other=0.0)
        if TMA:
            row = e * (2 * N if GATED else N) + first
            gates = w.load([row, start])
            gates = gates if SWAP else gates.T
        else:
            gates = _weights(w, base, gate_row, k, wn, wk, 2 * N if INTERLEAVED else N, K, EVEN_N, EVEN_K, SWAP)
        gate = _times(gates, rows, gate, WIDEN) if SWAP else _times(rows, gates, gate, WIDEN)
        if GATED:
            if TMA:
                ups = w.load([row + N, start])
                ups = ups if SWAP else ups.T
            else:
                ups = _weights(w, base, up_row, k, wn, wk, 2 * N, K, EVEN_N, EVEN_K, SWAP)
            up = _times(ups, rows, up, WIDEN) if SWAP else _times(rows, ups, up, WIDEN)
    if SWAP:
        gate = tl.trans(gate)
        up = tl.trans(up)
    inside = column < N
    if BIASED:
        biases = bias + e.to(tl.int64) * bias_expert
        gate += tl.load(biases + gate_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(biases + up_row, mask=inside, other=0.0).to(tl.float32)[None, :]
    value = activate(gate, up, alpha, limit, out.dtype.element_ty, KIND, FORM, GATED)
    at = out + place[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, value, mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def _experts_down(  # type: ignore[no-untyped-def]
    x, w, bias, weights, out, order, tiles, ids, live,
    w_expert, wn, wk, bias_expert,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BIASED: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the down product of a tile; rows times their weights go to their pairs' places."""
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(0) // COLUMNS
    e = _expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = _rows_of(tiles, order, tile, BM, SINGLE)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    base = e.to(tl.int64) * w_expert
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    sums = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if SWAP:
            at = x + place[None, :].to(tl.int64) * K + k[:, None]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[:, None], other=0.0)
        else:
            at = x + place[:, None].to(tl.int64) * K + k[None, :]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[None, :], other=0.0)
        if TMA:
            downs = w.load([e * N + first, start])
            downs = downs if SWAP else downs.T
        else:
            downs = _weights(w, base, column, k, wn, wk, N, K, EVEN_N, EVEN_K, SWAP)
        sums = _times(downs, rows, sums, WIDEN) if SWAP else _times(rows, downs, sums, WIDEN)
    if SWAP:
        sums = tl.trans(sums)
    inside = column < N
    if BIASED:
        sums += tl.load(bias + e.to(tl.int64) * bias_expert + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sums *= tl.load(weights + pair).to(tl.float32)[:, None]
    at = out + pair[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def _experts_combine(  # type: ignore[no-untyped-def]
    parts, ids, live, out,
    TOPK: tl.constexpr, E: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program sums BN columns of one token's parts, in float32, in the order of the slots."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < N
    owned = 0
    if MASKED:
        owned = tl.load(live + token)
    sums = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOPK):
        found = tl.load(ids + token * TOPK + slot).to(tl.int32)
        # what is not computed is not written either: it may hold NaN
        end = tl.where((found >= 0) & (found < E) & (owned >= 0), N, 0)
        at = parts + (token * TOPK + slot) * N + column
        sums += tl.load(at, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out + token * N + column, sums.to(out.dtype.element_ty), mask=inside)


def experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation = _SILU,
    gated: bool = True,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    live: torch.Tensor | None = None,
    parts: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Compute the chosen experts of every token: sum over slots of weight * down(activation(gate, up)).

    Sums are float32. They are rounded to the dtype of `hidden` after the first product, where torch rounds inside the
    activation, after the weighted second product, and at the end. Queues three or four launches on the current stream
    without synchronising; a graph can capture them. No gradient. Nothing is compiled anew for another T of the same
    regime (`tiles.py`).

    Args:
        hidden: [T, H] float32, bfloat16 or float16, rows may be strided. Read.
        ids: [T, k] int64 or int32, contiguous: the experts of each slot. Ids outside of 0 .. E - 1 (padding, experts of
            other ranks) add nothing. Read.
        weights: [T, k], contiguous, any float dtype: the routing weights. Read.
        up: [E, 2I, H], gate rows and then up rows; [E, I, H] without a gate; last two swapped if `transposed`. The
            dtype of `hidden`.
        down: [E, H, I]; last two swapped if `transposed`.
        activation: of gate and up.
        gated: whether `up` holds gates.
        up_bias: [E, 2I] or [E, I]; down_bias: [E, H]. Both or none.
        interleaved: rows of `up` take turns, gate and up.
        live: int64 [T]; a row whose entry is negative belongs to nobody: no expert is read for it, its result is 0.
            None: all rows count.
        parts: return the weighted results of the slots, [T, k, H], instead of their sum. Slots that add nothing hold
            anything.
        tiles: replaces the table's choice, for measurements.

    Returns:
        [T, H] (or the parts) in the dtype of `hidden`, new, the caller's.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    tokens, width = hidden.shape
    num_experts, inner = _check(hidden, ids, weights, up, down, gated, up_bias, down_bias, transposed, live)
    top_k = ids.shape[1]
    pairs = tokens * top_k
    found = torch.empty((tokens, top_k, width), dtype=hidden.dtype, device=hidden.device)
    if not tokens:
        return found if parts else torch.empty_like(hidden)
    if tiles is None:
        bulk = not transposed and width * up.element_size() % 16 == inner * up.element_size() % 16 == 0
        tiles = choose_tiles(tokens, top_k, num_experts, hidden.dtype, bulk=bulk)
    held = torch.empty((pairs, inner), dtype=hidden.dtype, device=hidden.device)
    capacity = pairs if tiles.single else min(pairs, num_experts) + pairs // tiles.rows
    order, table = ids, ids
    # without a mask any pointer does: that kernel has no instruction for it
    alive = ids if live is None else live
    masked = live is not None
    if not tiles.single:
        order = torch.empty(pairs + 4 * capacity, dtype=torch.int32, device=hidden.device)
        table = order[pairs:]
        _experts_group[(num_experts,)](
            ids, alive, order, table, pairs, capacity,
            TOPK=top_k, E=num_experts, EP=triton.next_power_of_2(num_experts), MASKED=masked,
            BM=tiles.rows, CHUNK=tiles.chunk, num_warps=4 if tiles.chunk <= 1024 else 8,
            **overlap(hidden.device),
        )  # fmt: skip
    shared: dict[str, Any] = {
        "TOPK": top_k, "E": num_experts, "MASKED": masked, "SINGLE": tiles.single,
        "WIDEN": hidden.device.type == "cpu", "BIASED": up_bias is not None, "BM": tiles.rows,
        **overlap(hidden.device),
    }  # fmt: skip
    _experts_gate_up[(capacity * triton.cdiv(inner, tiles.up.columns),)](
        hidden, _operand(up, tiles.up), up if up_bias is None else up_bias, held, order, table, ids, alive,
        activation.alpha, activation.limit,
        hidden.stride(0), up.stride(0), *_strides(up, transposed), 0 if up_bias is None else up_bias.stride(0),
        K=width, N=inner, KIND=activation.kind_code, FORM=activation.form_code, GATED=gated, INTERLEAVED=interleaved,
        COLUMNS=triton.cdiv(inner, tiles.up.columns), **_launch(tiles.up), **shared,
    )  # fmt: skip
    _experts_down[(capacity * triton.cdiv(width, tiles.down.columns),)](
        held, _operand(down, tiles.down), down if down_bias is None else down_bias, weights, found, order, table, ids,
        alive, down.stride(0), *_strides(down, transposed), 0 if down_bias is None else down_bias.stride(0),
        K=inner, N=width, COLUMNS=triton.cdiv(width, tiles.down.columns), **_launch(tiles.down), **shared,
    )  # fmt: skip
    if parts:
        return found
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    columns = 256 if tokens <= 64 else 1024
    _experts_combine[(tokens, triton.cdiv(width, columns))](
        found, ids, alive, out,
        TOPK=top_k, E=num_experts, N=width, MASKED=masked, BN=columns, num_warps=2 if tokens <= 64 else 4,
        **overlap(hidden.device),
    )  # fmt: skip
    return out


def _operand(weights: torch.Tensor, tile: Tile) -> Any:
    """The weights as a kernel takes them: the tensor, or a descriptor of all experts' rows, one below the other."""
    if not tile.tma:
        return weights
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = weights.shape[0] * weights.shape[1]
    columns = weights.shape[2]
    return TensorDescriptor(weights, [rows, columns], [columns, 1], [tile.columns, tile.depth])


def _strides(weights: torch.Tensor, transposed: bool) -> tuple[int, int]:
    """Strides of an output row and of the inner dimension."""
    return (weights.stride(2), weights.stride(1)) if transposed else (weights.stride(1), weights.stride(2))


def _launch(tile: Tile) -> dict[str, Any]:
    return {
        "BN": tile.columns, "BK": tile.depth, "SWAP": tile.swap, "TMA": tile.tma,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _check(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gated: bool,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    live: torch.Tensor | None,
) -> tuple[int, int]:
    """The number of experts and their inner width. Raises BadInput."""
    if hidden.dim() != 2 or hidden.dtype not in _DTYPES or hidden.stride(1) != 1:
        raise BadInput("hidden", f"{hidden.dtype} {tuple(hidden.shape)} where rows of floats were expected")
    tokens, width = hidden.shape
    if ids.dim() != 2 or len(ids) != tokens or not ids.is_contiguous() or ids.dtype not in (torch.int64, torch.int32):
        raise BadInput("ids", f"{ids.dtype} {tuple(ids.shape)} where contiguous integers [{tokens}, k] were expected")
    if weights.shape != ids.shape or not weights.is_contiguous() or not weights.is_floating_point():
        raise BadInput("weights", f"{weights.dtype} {tuple(weights.shape)} beside ids {tuple(ids.shape)}")
    if down.dim() != 3 or not 1 <= len(down) <= _MOST_EXPERTS:
        raise BadInput("down", f"shape {tuple(down.shape)} where [experts, H, I] was expected", limit=_MOST_EXPERTS)
    num_experts = len(down)
    out_width, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
    rows = 2 * inner if gated else inner
    wanted = (num_experts, width, rows) if transposed else (num_experts, rows, width)
    if out_width != width or tuple(up.shape) != wanted:
        raise BadInput("up", f"shape {tuple(up.shape)} beside down {tuple(down.shape)} and rows of {width}")
    if not up.is_contiguous() or not down.is_contiguous() or {up.dtype, down.dtype} != {hidden.dtype}:
        raise BadInput("up", f"weights must be contiguous {hidden.dtype}")
    if (up_bias is None) != (down_bias is None):
        raise BadInput("up_bias", "there is one bias of two")
    if up_bias is not None and (tuple(up_bias.shape) != (num_experts, rows) or up_bias.stride(1) != 1):
        raise BadInput("up_bias", f"shape {tuple(up_bias.shape)} where [{num_experts}, {rows}] was expected")
    if down_bias is not None and (tuple(down_bias.shape) != (num_experts, width) or down_bias.stride(1) != 1):
        raise BadInput("down_bias", f"shape {tuple(down_bias.shape)} where [{num_experts}, {width}] was expected")
    if live is not None and (live.shape != (tokens,) or live.dtype is not torch.int64 or not live.is_contiguous()):
        raise BadInput("live", f"{live.dtype} {tuple(live.shape)} where int64 [{tokens}] was expected")
    return num_experts, inner
