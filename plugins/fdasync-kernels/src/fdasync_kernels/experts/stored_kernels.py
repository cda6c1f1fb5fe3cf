"""Both products of experts whose weights stay as they were stored (`stored.py`).

A program reads values and scales, makes bfloat16 of them in registers, and multiplies as `kernels.py` does: sums,
roundings and places are as with plain weights, bit for bit. That holds where weights are the left side of the product
and fill its 64 rows: otherwise the compiler may take another instruction, and order the inner places of an instruction
by the narrower type. So there are no other tiles here, and rows of gate and up are one operand. FP8 comes by the bulk
copy engine where that can be, and then rows are in the order of `inner_order.py`. Knows no shapes to check. Launched by
`chain.py`. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdasync_kernels.experts.inner_order import column_at, in_order
from fdasync_kernels.experts.kernels import expert_of, put_activation, put_parts, rows_of
from fdasync_kernels.linear.kernel import times
from fdasync_kernels.overlap import let_next_come, wait_for_inputs
from fdasync_kernels.rounding import rounded

_BLOCK = tl.constexpr(128)
_GROUP = tl.constexpr(32)
# Of four bytes ($8) the lower halves ($0, $1) and the upper ones ($2, $3) as bfloat16, times powers of two ($4 and $5,
# $6 and $7). A value's three low bits go to the lowest places of the exponent and the highest of the mantissa, where
# they say 2^-126 of what they mean, zero and a half included.
_UNPACK = tl.constexpr("""
{
.reg .b32 p<2>, a<4>, b<4>, none;
mov.b32 none, 0x80008000;
prmt.b32 p0, $8, 0, 0x4140;
prmt.b32 p1, $8, 0, 0x4342;
shl.b32 a0, p0, 12;
shl.b32 a1, p1, 12;
shl.b32 a2, p0, 8;
shl.b32 a3, p1, 8;
shl.b32 b0, p0, 6;
shl.b32 b1, p1, 6;
shl.b32 b2, p0, 2;
shl.b32 b3, p1, 2;
and.b32 b0, b0, 0x01C001C0;
and.b32 b1, b1, 0x01C001C0;
and.b32 b2, b2, 0x01C001C0;
and.b32 b3, b3, 0x01C001C0;
lop3.b32 a0, a0, 0x80008000, b0, 0xEA;
lop3.b32 a1, a1, 0x80008000, b1, 0xEA;
lop3.b32 a2, a2, 0x80008000, b2, 0xEA;
lop3.b32 a3, a3, 0x80008000, b3, 0xEA;
fma.rn.bf16x2 $0, a0, $4, none;
fma.rn.bf16x2 $1, a1, $5, none;
fma.rn.bf16x2 $2, a2, $6, none;
fma.rn.bf16x2 $3, a3, $7, none;
}
""")


@triton.jit
def _half(bits, power):
    """As `_UNPACK`, of values in the low half of a byte: for the interpreter, which knows no assembly."""
    value = (((bits & 8) << 12) | ((bits & 7) << 6)) << 16
    return (value.to(tl.float32, bitcast=True) * power.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _power(exponent):
    """bfloat16: 2^126 times the power of two that a stored exponent says."""
    return ((exponent.to(tl.int32) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _four_bits(packed, low, high, WIDEN: tl.constexpr):
    """Two groups, bfloat16 [ROWS, 32] each, of packed values [ROWS, 32] and their exponents [ROWS]."""
    if WIDEN:
        bits = packed.to(tl.int32)
        return _half(bits & 15, _power(low)), _half(bits >> 4, _power(high))
    else:
        return tl.inline_asm_elementwise(
            asm=_UNPACK, constraints="=r,=r,=r,=r,r,r,r,r,r", args=[_power(low), _power(high), packed],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _product(
    x_at, seen, w, scales, e, row, first, begin,
    N: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, HALVES: tl.constexpr, FOUR: tl.constexpr,
    BULK: tl.constexpr, READY: tl.constexpr, EVEN_N: tl.constexpr,
    MASKED: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, BM]: rows `row` of the matrix [N, INNER] of expert `e`, at the K inner places from `begin` on, by
    BM rows at `x_at`. MASKED: only those rows of `x_at` are read that are `seen`. BULK: `w` is a descriptor of FP8 [E *
    HALVES, N / HALVES, INNER], and rows are taken from `first` on in each half. READY: `x_at` is in order."""
    sums = tl.zeros((ROWS, BM), tl.float32)
    # rows past the matrix's end are replaced by its first row, and their sums are not stored
    place = row if EVEN_N else tl.where(row < N, row, 0)
    own = e.to(tl.int64) * N + place
    EVEN_K: tl.constexpr = K % BK == 0
    if FOUR:
        byte = tl.arange(0, _GROUP)
        at = w + own[:, None] * (INNER // 2) + begin // 2 + byte[None, :]
        at_scale = scales + own * (INNER // _GROUP) + begin // _GROUP
        for start in range(0, K, BK):
            for part in tl.static_range(0, BK, 2 * _GROUP):
                if EVEN_K or start + part < K:
                    k = start + part
                    low, high = _four_bits(
                        tl.load(at + k // 2),
                        tl.load(at_scale + k // _GROUP),
                        tl.load(at_scale + k // _GROUP + 1),
                        WIDEN,
                    )
                    x_low = x_at + k + byte[:, None]
                    if MASKED:
                        sums = times(low, tl.load(x_low, mask=seen, other=0.0), sums, WIDEN)
                        sums = times(high, tl.load(x_low + _GROUP, mask=seen, other=0.0), sums, WIDEN)
                    else:
                        sums = times(low, tl.load(x_low), sums, WIDEN)
                        sums = times(high, tl.load(x_low + _GROUP), sums, WIDEN)
    else:
        depth = tl.arange(0, BK)
        x_column = column_at(BK) if BULK and not READY else depth
        if not BULK:
            at = w + own[:, None] * INNER + begin + depth[None, :]
        block = (e.to(tl.int64) * ((N + _BLOCK - 1) // _BLOCK) + place // _BLOCK) * ((INNER + _BLOCK - 1) // _BLOCK)
        for start in range(0, K, BK):
            inside = start + depth < K
            if BULK:
                # zeros past the ends
                value = in_order(w.load([e * HALVES, first, begin + start]).reshape(ROWS, BK), ROWS, BK)
            elif EVEN_K:
                value = tl.load(at + start)
            else:
                value = tl.load(at + start, mask=inside[None, :], other=0.0)
            value = value.to(tl.float32)
            value *= tl.load(scales + block + (begin + start) // _BLOCK)[:, None]
            weights = rounded(value, tl.bfloat16).to(tl.bfloat16)
            if EVEN_K and not MASKED:
                rows = tl.load(x_at + start + x_column[:, None])
            else:
                wanted = inside[:, None] & seen if MASKED else inside[:, None]
                rows = tl.load(x_at + start + x_column[:, None], mask=wanted, other=0.0)
            sums = times(weights, rows, sums, WIDEN)
    return sums


@triton.jit(do_not_specialize_on_alignment=["live"])
def stored_gate_up(
    x, w, scales, bias, out, order, tiles, ids, live, alpha, limit, x_row, bias_expert,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FOUR: tl.constexpr, BULK: tl.constexpr, READY: tl.constexpr, ORDERED: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the activation for one tile of pairs; `out` is in grouped order. BULK and READY: as
    in `_product`, not with INTERLEAVED. ORDERED: `out` is ready for the second product."""
    wait_for_inputs(OVERLAP, SINGLE)
    tile = tl.program_id(0) // COLUMNS
    e = expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = rows_of(tiles, order, tile, BM, SINGLE)
    token = (pair // TOPK).to(tl.int64)
    first = tl.program_id(0) % COLUMNS * BN
    HALVES: tl.constexpr = 2 if GATED else 1
    # rows of gate and up of one product, one below the other
    each = tl.arange(0, HALVES * BN)
    row = (
        first * HALVES + each if INTERLEAVED or not GATED else tl.where(each < BN, first + each, N - BN + first + each)
    )
    # of a single pair's tile one row is read, and not as often as there are rows
    sums = _product(
        x + token[None, :] * x_row, real[None, :], w, scales, e, row, first, 0,
        HALVES * N, K, K, HALVES, FOUR, BULK, READY, N % BN == 0, SINGLE, WIDEN, HALVES * BN, BM, BK,
    )  # fmt: skip
    if not GATED:
        gate = sums
        up = sums
    elif INTERLEAVED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BN, 2, BM)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BN, BM)), (1, 2, 0)))
    if SINGLE:
        let_next_come(OVERLAP)
    put_activation(
        tl.trans(gate), tl.trans(up), bias, out, e, place, real, first + tl.arange(0, BN), alpha, limit, bias_expert,
        N, KIND, FORM, GATED, BIASED, INTERLEAVED, ORDERED,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["live"])
def stored_down(
    x, w, scales, bias, weights, out, order, tiles, ids, live, bias_expert, out_slice,
    TOPK: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, BIASED: tl.constexpr,
    FOUR: tl.constexpr, BULK: tl.constexpr, MASKED: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `experts_down`: BN columns of a tile, of one of SLICES parts of K inner places, times the routing weights.
    BULK: as in `_product`, and rows are in order."""
    wait_for_inputs(OVERLAP, SINGLE)
    tile = tl.program_id(0) // COLUMNS
    e = expert_of(tiles, ids, live, tile, TOPK, E, MASKED, SINGLE)
    if e < 0:
        return
    place, pair, real = rows_of(tiles, order, tile, BM, SINGLE)
    first = tl.program_id(0) % COLUMNS * BN
    column = first + tl.arange(0, BN)
    begin = tl.program_id(1) * K
    sums = _product(
        x + begin + place[None, :].to(tl.int64) * (K * SLICES), real[None, :], w, scales, e, column, first, begin,
        N, K, K * SLICES, 1, FOUR, BULK, True, N % BN == 0, SINGLE, WIDEN, BN, BM, BK,
    )  # fmt: skip
    if SINGLE:
        let_next_come(OVERLAP)
    put_parts(tl.trans(sums), bias, weights, out, e, pair, real, column, bias_expert, out_slice, N, BIASED)
