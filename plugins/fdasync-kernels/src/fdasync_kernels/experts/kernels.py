"""Three kernels of the experts: gate and up, down, sum.

A tile is up to BM pairs (token, slot) of one expert. Products walk their inner dimension in order, in float32, whatever
the tile is. Knows no shapes to check and no tiles to choose: `chain.py` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.experts.activation import activate
from fdasync_kernels.experts.inner_order import in_order
from fdasync_kernels.linear.kernel import plus_bias, times
from fdasync_kernels.overlap import let_next_come, wait_for_inputs
from fdasync_kernels.rounding import rounded


@triton.jit
def expert_of(tiles, ids, live, tile, TOPK: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr):
    """The expert of a tile; -1: nothing to do. SINGLE: the tile is one pair."""
    if SINGLE:
        found = tl.load(ids + tile)
        # compared in its own width: the low half of a wide id may be an expert
        real = (found >= 0) & (found < E)
        if MASKED:
            real = real & (tl.load(live + tile // TOPK) >= 0)
        return tl.where(real, found, -1).to(tl.int32)
    else:
        return tl.load(tiles + tile * 4)


@triton.jit
def rows_of(tiles, order, tile, BM: tl.constexpr, SINGLE: tl.constexpr):
    """A tile's rows: their places in grouped order, their pairs, and which are real; others repeat the first."""
    row = tl.arange(0, BM)
    if SINGLE:
        return tile + row * 0, tile + row * 0, row < 1
    else:
        first = tl.load(tiles + tile * 4 + 1)
        real = row < tl.load(tiles + tile * 4 + 2)
        place = first + tl.where(real, row, 0)
        return place, tl.load(order + place), real


@triton.jit
def _weights(
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


@triton.jit
def put_activation(
    gate, up, bias, out, e, place, real, column, alpha, limit, bias_expert,
    N: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ORDERED: tl.constexpr = False,
):  # fmt: skip
    """Store the activation of sums [BM, BN] of gate and up, with their biases, at a tile's places in grouped order.
    ORDERED: columns are in that of `in_order`; N and BN are multiples of 16."""
    inside = column < N
    if BIASED:
        biases = bias + e.to(tl.int64) * bias_expert
        gate_row = column * 2 if INTERLEAVED else column
        gate = plus_bias(gate, tl.load(biases + gate_row, mask=inside, other=0.0)[None, :])
        if GATED:
            up_row = column * 2 + 1 if INTERLEAVED else N + column
            up = plus_bias(up, tl.load(biases + up_row, mask=inside, other=0.0)[None, :])
    value = activate(gate, up, alpha, limit, out.dtype.element_ty, KIND, FORM, GATED)
    if ORDERED:
        value = in_order(value, value.shape[0], value.shape[1])
    at = out + place[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, value, mask=real[:, None] & inside[None, :])


@triton.jit
def put_parts(
    sums, bias, weights, out, e, pair, real, column, bias_expert, out_slice, N: tl.constexpr, BIASED: tl.constexpr
):
    """Store sums [BM, BN] of the second product, with their bias and times the routing weights, at the pairs' places in
    the program's slice."""
    inside = column < N
    if BIASED:
        own = bias + e.to(tl.int64) * bias_expert + column
        sums = plus_bias(sums, tl.load(own, mask=inside, other=0.0)[None, :])
    sums *= tl.load(weights + pair).to(tl.float32)[:, None]
    at = out + tl.program_id(1).to(tl.int64) * out_slice + pair[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, rounded(sums, out.dtype.element_ty).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["live"])
def experts_gate_up(
    x, w, bias, out, order, tiles, ids, live, alpha, limit,
    x_row, w_expert, wn, wk, bias_expert,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, INTERLEAVED: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the activation for one tile of pairs; `out` is in grouped order."""
    wait_for_inputs(OVERLAP, SINGLE)
    tile = tl.program_id(0) // COLUMNS
    e = expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = rows_of(tiles, order, tile, BM, SINGLE)
    token = (pair // TOPK).to(tl.int64)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    gate_row = column * 2 if INTERLEAVED else column
    up_row = column * 2 + 1 if INTERLEAVED else N + column
    # rows of the gate past its end are masked by the gate's end, rows of the up half by the whole end
    base = e.to(tl.int64) * w_expert
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    gate = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    up = gate
    both = tl.zeros((2 * BN, BM), tl.float32)
    each = tl.arange(0, 2 * BN)
    # PAIRED: rows of gate and up, one below the other
    both_row = first * 2 + each if INTERLEAVED else tl.where(each < BN, first + each, N - BN + first + each)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if SWAP:
            at = x + token[None, :] * x_row + k[:, None]
            # of a single pair's tile one row is read, and not as often as there are rows
            wanted = (k < K)[:, None] & real[None, :] if SINGLE else (k < K)[:, None]
            rows = tl.load(at) if EVEN_K and not SINGLE else tl.load(at, mask=wanted, other=0.0)
        else:
            at = x + token[:, None] * x_row + k[None, :]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[None, :], other=0.0)
        if PAIRED:
            halves = _weights(w, base, both_row, k, wn, wk, 2 * N, K, EVEN_N, EVEN_K, SWAP)
            both = times(halves, rows, both, WIDEN)
        else:
            if TMA:
                row = e * (2 * N if GATED else N) + first
                gates = w.load([row, start])
                gates = gates if SWAP else gates.T
            else:
                gates = _weights(w, base, gate_row, k, wn, wk, 2 * N if INTERLEAVED else N, K, EVEN_N, EVEN_K, SWAP)
            gate = times(gates, rows, gate, WIDEN) if SWAP else times(rows, gates, gate, WIDEN)
            if GATED:
                if TMA:
                    ups = w.load([row + N, start])
                    ups = ups if SWAP else ups.T
                else:
                    ups = _weights(w, base, up_row, k, wn, wk, 2 * N, K, EVEN_N, EVEN_K, SWAP)
                up = times(ups, rows, up, WIDEN) if SWAP else times(rows, ups, up, WIDEN)
    if PAIRED:
        if INTERLEAVED:
            gate, up = tl.split(tl.permute(tl.reshape(both, (BN, 2, BM)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(both, (2, BN, BM)), (1, 2, 0)))
    if SINGLE:
        let_next_come(OVERLAP)
    if SWAP:
        gate = tl.trans(gate)
        up = tl.trans(up)
    put_activation(
        gate, up, bias, out, e, place, real, column, alpha, limit, bias_expert,
        N, KIND, FORM, GATED, BIASED, INTERLEAVED,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["live"])
def experts_down(
    x, w, bias, weights, out, order, tiles, ids, live,
    w_expert, wn, wk, bias_expert, out_slice,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, BIASED: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the down product of a tile; rows times their weights go to their pairs' places.
    With SLICES it takes one of so many parts of the inner dimension, of K places each; parts are `out_slice` apart."""
    wait_for_inputs(OVERLAP, SINGLE)
    tile = tl.program_id(0) // COLUMNS
    e = expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = rows_of(tiles, order, tile, BM, SINGLE)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    begin = tl.program_id(1) * K
    base = e.to(tl.int64) * w_expert + begin * wk
    ROW: tl.constexpr = K * SLICES
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    sums = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if SWAP:
            at = x + begin + place[None, :].to(tl.int64) * ROW + k[:, None]
            # of a single pair's tile one row is read, and not as often as there are rows
            wanted = (k < K)[:, None] & real[None, :] if SINGLE else (k < K)[:, None]
            rows = tl.load(at) if EVEN_K and not SINGLE else tl.load(at, mask=wanted, other=0.0)
        else:
            at = x + begin + place[:, None].to(tl.int64) * ROW + k[None, :]
            rows = tl.load(at) if EVEN_K else tl.load(at, mask=(k < K)[None, :], other=0.0)
        if TMA:
            downs = w.load([e * N + first, begin + start])
            downs = downs if SWAP else downs.T
        else:
            downs = _weights(w, base, column, k, wn, wk, N, K, EVEN_N, EVEN_K, SWAP)
        sums = times(downs, rows, sums, WIDEN) if SWAP else times(rows, downs, sums, WIDEN)
    if SINGLE:
        let_next_come(OVERLAP)
    if SWAP:
        sums = tl.trans(sums)
    put_parts(sums, bias, weights, out, e, pair, real, column, bias_expert, out_slice, N, BIASED)


@triton.jit
def _slots(parts, ids, token, column, owned, TOPK: tl.constexpr, E: tl.constexpr, N: tl.constexpr):
    """The sum of one token's parts, in float32, in the order of the slots, rounded to their dtype."""
    sums = tl.zeros(column.shape, tl.float32)
    for slot in tl.static_range(TOPK):
        found = tl.load(ids + token * TOPK + slot)
        # places not computed are not written either: they may hold NaN
        end = tl.where((found >= 0) & (found < E) & (owned >= 0), N, 0)
        at = parts + (token * TOPK + slot) * N + column
        sums += tl.load(at, mask=column < end, other=0.0).to(tl.float32)
    return rounded(sums, parts.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["live"])
def experts_combine(
    parts, ids, live, out, part_slice,
    TOPK: tl.constexpr, E: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, MASKED: tl.constexpr,
    BN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program sums BN columns of one token's parts. Slices, `part_slice` apart, are added as a tree of neighbours."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    owned = 0
    if MASKED:
        owned = tl.load(live + token)
    # three of them may be more than 2^31 elements away, where one is not
    apart = tl.cast(part_slice, tl.int64)
    total = _slots(parts, ids, token, column, owned, TOPK, E, N)
    if SLICES >= 2:
        total += _slots(parts + apart, ids, token, column, owned, TOPK, E, N)
    if SLICES == 4:
        third = _slots(parts + 2 * apart, ids, token, column, owned, TOPK, E, N)
        total += third + _slots(parts + 3 * apart, ids, token, column, owned, TOPK, E, N)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)
