"""Both products of experts that have many rows, for weights that the bulk copy engine can read.

What costs most in the first are rows that are not asked for: an expert's last tile is half empty on average. So a tile
of at most half the rows is computed as one of half the height, and rows that are not real are not read. Gates and up
rows come as one block, of one product. Tiles are cut so that two programs fit a processor: one multiplies while the
other begins or ends.

What costs most in the second, whose inner dimension is short, are a tile's beginning and end. So as many programs as
the device has processors take the tiles in turn, and the loop over tiles and that over the inner dimension are one:
while results are rounded and stored, the next tile's first rows and weights come, both by the copy engine.

Sums, roundings and places are as in `kernels.py`, bit for bit. Knows no grouping (`grouping.py`) and no shapes to
check. Called by `chain.py`. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fdasync_kernels.chip import processors_of
from fdasync_kernels.experts.activation import activate
from fdasync_kernels.linear.kernel import plus_bias, times
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.rounding import rounded

if TYPE_CHECKING:
    import torch

    from fdasync_kernels.experts.activation import Activation
    from fdasync_kernels.experts.tiles import Tile


def gate_up_many(
    hidden: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: torch.Tensor,
    table: torch.Tensor,
    *,
    top_k: int,
    gated: bool,
    activation: Activation,
    rows: int,
    tile: Tile,
) -> None:
    """The first product and the activation of `hidden` [T, H] into `out` [T * k, I], in grouped order.

    `up` and `bias` are as in `chain.experts`, neither transposed nor interleaved; `order` and `table` are of
    `grouping.group`, for tiles of `rows` pairs.
    """
    num_experts, weight_rows, width = up.shape
    inner, halves = out.shape[1], 2 if gated else 1
    # gates and up rows apart, so that one block takes the same of both
    weights = up.view(halves * num_experts, weight_rows // halves, width)
    columns = triton.cdiv(inner, tile.columns)
    experts_gate_up_many[(len(table) // 4 * columns,)](
        hidden, _descriptor(weights, halves, tile.columns, tile.depth), up if bias is None else bias, out, order, table,
        activation.alpha, activation.limit, hidden.stride(0), 0 if bias is None else bias.stride(0),
        TOPK=top_k, K=width, N=inner, KIND=activation.kind_code, FORM=activation.form_code, GATED=gated,
        BIASED=bias is not None, COLUMNS=columns, **_options(hidden.device, rows, tile),
    )  # fmt: skip


def down_many(
    held: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    table: torch.Tensor,
    *,
    rows: int,
    tile: Tile,
) -> None:
    """The second product of `held` [T * k, I] times the routing weights into `out` [slices, T, k, H], at the pairs'
    places. The depth of the tile divides I / slices, where slices are more than one."""
    slices, width = out.shape[0], out.shape[-1]
    columns = triton.cdiv(width, tile.columns)
    experts_down_many[(min(len(table) // 4 * columns * slices, processors_of(held.device)),)](
        _descriptor(held, rows, tile.depth), _descriptor(down, 1, tile.columns, tile.depth),
        down if bias is None else bias, weights, out, order, table,
        0 if bias is None else bias.stride(0), out.stride(0),
        K=held.shape[1] // slices, N=width, SLICES=slices, BIASED=bias is not None,
        COLUMNS=columns, **_options(held.device, rows, tile),
    )  # fmt: skip


def _descriptor(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _options(device: torch.device, rows: int, tile: Tile) -> dict[str, Any]:
    return {
        "BM": rows, "BN": tile.columns, "BK": tile.depth, "WIDEN": device.type == "cpu",
        "num_warps": tile.warps, "num_stages": tile.stages, **overlap(device),
    }  # fmt: skip


@triton.jit
def _gate_up(
    x, w, bias, out, order, e, begin, count, first, alpha, limit, x_row,
    TOPK: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of at most BM pairs."""
    HALVES: tl.constexpr = 2 if GATED else 1
    row = tl.arange(0, BM)
    real = row < count
    token = tl.load(order + begin + tl.where(real, row, 0)) // TOPK
    at = x + token.to(tl.int64)[:, None] * x_row + tl.arange(0, BK)[None, :]
    sums = tl.zeros((BM, HALVES * BN), tl.float32)
    for start in range(0, K, BK):
        inside = real[:, None] if K % BK == 0 else real[:, None] & (start + tl.arange(0, BK) < K)[None, :]
        rows = tl.load(at + start, mask=inside, other=0.0)
        sums = times(rows, w.load([e * HALVES, first, start]).reshape(HALVES * BN, BK).T, sums, WIDEN)
    if GATED:
        gate, up = tl.split(sums.reshape(BM, 2, BN).permute(0, 2, 1))
    else:
        gate = sums
        up = sums
    column = first + tl.arange(0, BN)
    if BIASED:
        gate = plus_bias(gate, tl.load(bias + column, mask=column < N, other=0.0)[None, :])
        if GATED:
            up = plus_bias(up, tl.load(bias + N + column, mask=column < N, other=0.0)[None, :])
    value = activate(gate, up, alpha, limit, out.dtype.element_ty, KIND, FORM, GATED)
    place = out + (begin + row).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, value, mask=real[:, None] & (column < N)[None, :])


@triton.jit
def experts_gate_up_many(
    x, w, bias, out, order, tiles, alpha, limit, x_row, bias_expert,
    TOPK: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of the activation for one tile of pairs; `out` is in grouped order."""
    wait_for_inputs(OVERLAP)
    entry = tiles + tl.program_id(0) // COLUMNS * 4
    e = tl.load(entry)
    if e < 0:
        return
    begin = tl.load(entry + 1)
    count = tl.load(entry + 2)
    first = tl.program_id(0) % COLUMNS * BN
    own = bias + e.to(tl.int64) * bias_expert
    if count > BM // 2:
        _gate_up(
            x, w, own, out, order, e, begin, count, first, alpha, limit, x_row,
            TOPK, K, N, KIND, FORM, GATED, BIASED, BM, BN, BK, WIDEN,
        )  # fmt: skip
    else:
        _gate_up(
            x, w, own, out, order, e, begin, count, first, alpha, limit, x_row,
            TOPK, K, N, KIND, FORM, GATED, BIASED, BM // 2, BN, BK, WIDEN,
        )  # fmt: skip


@triton.jit
def experts_down_many(
    x, w, bias, weights, out, order, tiles, bias_expert, out_slice,
    K: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes BN columns of one tile after another; rows times their weights go to their pairs' places. SLICES:
    as `experts_down` has them."""
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, BM)
    count = tl.load(tiles + 3) * COLUMNS * SLICES
    for number in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        entry = tiles + number // (COLUMNS * SLICES) * 4
        part = number // COLUMNS % SLICES
        first = number % COLUMNS * BN
        e = tl.load(entry)
        begin = tl.load(entry + 1)
        sums = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            # past the tile's last row there are others' rows, or none: their sums are not stored
            rows = x.load([begin, part * K + start])
            sums = times(rows, w.load([e, first, part * K + start]).reshape(BN, BK).T, sums, WIDEN)
        real = row < tl.load(entry + 2)
        pair = tl.load(order + begin + tl.where(real, row, 0))
        column = first + tl.arange(0, BN)
        if BIASED:
            own = bias + e.to(tl.int64) * bias_expert + column
            sums = plus_bias(sums, tl.load(own, mask=column < N, other=0.0)[None, :])
        sums *= tl.load(weights + pair).to(tl.float32)[:, None]
        at = out + part.to(tl.int64) * out_slice + pair.to(tl.int64)[:, None] * N + column[None, :]
        value = rounded(sums, out.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(at, value, mask=real[:, None] & (column < N)[None, :])
