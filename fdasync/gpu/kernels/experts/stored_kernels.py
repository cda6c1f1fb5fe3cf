"""Both products of experts whose weights stay as they were stored (`stored.py`).

A program reads values and scales, makes bfloat16 of them in registers, and multiplies as `kernels.py` does: sums,
roundings and places are those of plain weights, bit for bit. That holds where weights are the left side of the product,
fill its 64 rows, and stand beside 16 pairs or more: otherwise the compiler takes another instruction, and orders the
inner places of one by the narrower type. So there are no other tiles here. Knows no shapes to check. Launched by
`chain.py`. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync.gpu.kernels.experts.activation import activate
from fdasync.gpu.kernels.experts.kernels import expert_of, rows_of
from fdasync.gpu.kernels.linear.kernel import plus_bias, times
from fdasync.gpu.kernels.overlap import let_next_come, wait_for_inputs
from fdasync.gpu.kernels.rounding import rounded

_BLOCK = tl.constexpr(128)
_GROUP = tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def _four_bits(packed, scale, ROWS: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """bfloat16 [ROWS, BK] of packed values [ROWS, BK / 2] and exponents [ROWS, BK / 32].

    The three low bits of a value are the two lowest of float16's exponent and the highest of its mantissa, 2^14 too
    small, zero and a half included.
    """
    pair = tl.join(packed & 15, packed >> 4).reshape(ROWS, BK // _GROUP, _GROUP).to(tl.int16)
    half = ((pair & 8) << 12) | ((pair & 7) << 9)
    power = ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * power[:, :, None]
    return value.reshape(ROWS, BK).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    w, scales, e, row, rows, start,
    N: tl.constexpr, K: tl.constexpr, FOUR: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """bfloat16 [ROWS, BK] of expert `e`: of rows `row` of N, which are real below `rows`, from inner place `start` on.
    Zeros past the ends. EVEN: nothing is past them."""
    wide = e.to(tl.int64) * N + row
    real = row < rows
    if FOUR:
        byte = start // 2 + tl.arange(0, BK // 2)
        group = start // _GROUP + tl.arange(0, BK // _GROUP)
        at = w + wide[:, None] * (K // 2) + byte[None, :]
        at_scale = scales + wide[:, None] * (K // _GROUP) + group[None, :]
        if EVEN:
            return _four_bits(tl.load(at), tl.load(at_scale), ROWS, BK)
        packed = tl.load(at, mask=real[:, None] & (byte < K // 2)[None, :], other=0)
        scale = tl.load(at_scale, mask=real[:, None] & (group < K // _GROUP)[None, :], other=0)
        return _four_bits(packed, scale, ROWS, BK)
    else:
        k = start + tl.arange(0, BK)
        at = w + wide[:, None] * K + k[None, :]
        block = (e.to(tl.int64) * ((N + _BLOCK - 1) // _BLOCK) + row // _BLOCK) * ((K + _BLOCK - 1) // _BLOCK)
        at_scale = scales + block + start // _BLOCK
        if EVEN:
            value = tl.load(at).to(tl.float32) * tl.load(at_scale)[:, None]
        else:
            value = tl.load(at, mask=real[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            value *= tl.load(at_scale, mask=real, other=0.0)[:, None]
        return rounded(value, tl.bfloat16).to(tl.bfloat16)


@triton.jit(do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def stored_gate_up(  # type: ignore[no-untyped-def]
    x, w, scales, bias, out, order, tiles, ids, live, alpha, limit, x_row, bias_expert,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FOUR: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr,
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
    HALVES: tl.constexpr = 2 if GATED else 1
    EVEN: tl.constexpr = N % BN == 0 and K % BK == 0
    EVEN_K: tl.constexpr = K % BK == 0
    gate_row = column * 2 if INTERLEAVED else column
    up_row = column * 2 + 1 if INTERLEAVED else N + column
    # rows of gate and up of one product, one below the other
    each = tl.arange(0, 2 * BN)
    both_row = first * 2 + each if INTERLEAVED else tl.where(each < BN, first + each, N - BN + first + each)
    gate = tl.zeros((BN, BM), tl.float32)
    up = gate
    both = tl.zeros((2 * BN, BM), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = x + token[None, :] * x_row + k[:, None]
        # of a single pair's tile one row is read, and not as often as there are rows
        wanted = (k < K)[:, None] & real[None, :] if SINGLE else (k < K)[:, None]
        rows = tl.load(at) if EVEN_K and not SINGLE else tl.load(at, mask=wanted, other=0.0)
        if PAIRED:
            halves = _weights(w, scales, e, both_row, 2 * N, start, 2 * N, K, FOUR, EVEN, 2 * BN, BK)
            both = times(halves, rows, both, WIDEN)
        else:
            # rows of the gate past its end are masked by the gate's end, those of the up half by the whole
            last = 2 * N if INTERLEAVED else N
            gates = _weights(w, scales, e, gate_row, last, start, HALVES * N, K, FOUR, EVEN, BN, BK)
            gate = times(gates, rows, gate, WIDEN)
            if GATED:
                ups = _weights(w, scales, e, up_row, 2 * N, start, 2 * N, K, FOUR, EVEN, BN, BK)
                up = times(ups, rows, up, WIDEN)
    if PAIRED:
        if INTERLEAVED:
            gate, up = tl.split(tl.permute(tl.reshape(both, (BN, 2, BM)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(both, (2, BN, BM)), (1, 2, 0)))
    if SINGLE:
        let_next_come(OVERLAP)
    gate = tl.trans(gate)
    up = tl.trans(up)
    inside = column < N
    if BIASED:
        biases = bias + e.to(tl.int64) * bias_expert
        gate = plus_bias(gate, tl.load(biases + gate_row, mask=inside, other=0.0)[None, :])
        if GATED:
            up = plus_bias(up, tl.load(biases + up_row, mask=inside, other=0.0)[None, :])
    value = activate(gate, up, alpha, limit, out.dtype.element_ty, KIND, FORM, GATED)
    at = out + place[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, value, mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def stored_down(  # type: ignore[no-untyped-def]
    x, w, scales, bias, weights, out, order, tiles, ids, live, bias_expert, out_slice,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, BIASED: tl.constexpr,
    FOUR: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `experts_down`: BN columns of a tile, of one of SLICES parts of K inner places, times the routing weights."""
    wait_for_inputs(OVERLAP, SINGLE)
    tile = tl.program_id(0) // COLUMNS
    e = expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = rows_of(tiles, order, tile, BM, SINGLE)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    begin = tl.program_id(1) * K
    ROW: tl.constexpr = K * SLICES
    EVEN: tl.constexpr = N % BN == 0 and K % BK == 0
    EVEN_K: tl.constexpr = K % BK == 0
    sums = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = x + begin + place[None, :].to(tl.int64) * ROW + k[:, None]
        wanted = (k < K)[:, None] & real[None, :] if SINGLE else (k < K)[:, None]
        rows = tl.load(at) if EVEN_K and not SINGLE else tl.load(at, mask=wanted, other=0.0)
        downs = _weights(w, scales, e, column, N, begin + start, N, ROW, FOUR, EVEN, BN, BK)
        sums = times(downs, rows, sums, WIDEN)
    if SINGLE:
        let_next_come(OVERLAP)
    sums = tl.trans(sums)
    inside = column < N
    if BIASED:
        own = bias + e.to(tl.int64) * bias_expert + column
        sums = plus_bias(sums, tl.load(own, mask=inside, other=0.0)[None, :])
    sums *= tl.load(weights + pair).to(tl.float32)[:, None]
    at = out + tl.program_id(1).to(tl.int64) * out_slice + pair[:, None].to(tl.int64) * N + column[None, :]
    tl.store(at, rounded(sums, out.dtype.element_ty).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
