"""The short causal convolution in front of recurrent layers: each channel over its own last few tokens.

A sequence's state is its last inputs, [channels, kept], the newest last. Rows and states are as in `spans.py`. Knows no
models. Called by the plugins' GPU runners. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from fdasync_kernels.recurrence.spans import Spans

_CHANNELS = 256


@triton.jit(
    do_not_specialize_on_alignment=[
        "x",
        "columns",
        "out",
        "states",
        "sources",
        "first_rows",
        "owners",
        "first_stops",
        "stops",
    ]
)
def _conv_kernel(
    x, columns, weight, bias, states, out, sources, first_rows, owners, first_stops, stops, x_row, state_row,
    state_channel, channels, taps: tl.constexpr, kept: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr,
    single: tl.constexpr, mapped: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    owner = row if single else tl.load(owners + row)
    sequence = tl.maximum(owner, 0)
    source = tl.where(owner < 0, -2, tl.load(sources + sequence))
    first = row if single else tl.load(first_rows + sequence)
    channel = tl.program_id(1) * cells + tl.arange(0, cells)
    here = channel < channels
    column = tl.load(columns + channel, mask=here, other=0) if mapped else channel
    held = states + tl.maximum(source, 0).to(tl.int64) * state_row + channel * state_channel
    total = tl.zeros((cells,), tl.float32)
    if has_bias:
        total += tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)
    for tap in tl.static_range(taps):
        at = row - (taps - 1) + tap
        inside = at >= first
        now = tl.load(x + at.to(tl.int64) * x_row + column, mask=channel < tl.where(inside, channels, 0), other=0.0)
        # what the sequence's state still has of it
        old = tl.where((at < first) & (source >= 0), channels, 0)
        before = tl.load(held + kept + at - first, mask=channel < old, other=0.0)
        value = tl.where(inside, now.to(tl.float32), before.to(tl.float32))
        total += tl.load(weight + channel * taps + tap, mask=here, other=0.0).to(tl.float32) * value
    # rounded where the library's convolution does
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if silu:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row.to(tl.int64) * channels + channel, tl.where(source == -2, 0.0, total), mask=here)
    if single and source > -2:
        begun = tl.where(source >= 0, channels, 0)
        newest = tl.load(x + row.to(tl.int64) * x_row + column, mask=here, other=0.0)
        for stop in range(tl.load(first_stops + row), tl.load(first_stops + row + 1)):
            target = states + tl.load(stops + 2 * stop + 1).to(tl.int64) * state_row + channel * state_channel
            # a thread has all cells of a channel, and writes each after it was read
            for cell in tl.static_range(kept - 1):
                tl.store(target + cell, tl.load(held + cell + 1, mask=channel < begun, other=0.0), mask=here)
            tl.store(target + kept - 1, newest, mask=here)


@triton.jit(do_not_specialize_on_alignment=["x", "columns", "states", "sources", "first_rows", "first_stops", "stops"])
def _keep_kernel(
    x, columns, states, sources, first_rows, first_stops, stops, x_row, state_row, state_channel, channels,
    kept: tl.constexpr, mapped: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    source = tl.load(sources + sequence)
    if source > -2:
        channel = tl.program_id(1) * cells + tl.arange(0, cells)
        here = channel < channels
        column = tl.load(columns + channel, mask=here, other=0) if mapped else channel
        first = tl.load(first_rows + sequence)
        held = states + tl.maximum(source, 0).to(tl.int64) * state_row + channel * state_channel
        for stop in range(tl.load(first_stops + sequence), tl.load(first_stops + sequence + 1)):
            end = tl.load(stops + 2 * stop)
            target = states + tl.load(stops + 2 * stop + 1).to(tl.int64) * state_row + channel * state_channel
            # as above; the last stop alone may be where the state is read from
            for cell in tl.static_range(kept):
                at = end - kept + cell
                inside = at >= first
                old = tl.where((at < first) & (source >= 0), channels, 0)
                now = tl.load(
                    x + at.to(tl.int64) * x_row + column, mask=channel < tl.where(inside, channels, 0), other=0.0
                )
                before = tl.load(held + kept + at - first, mask=channel < old, other=0.0)
                tl.store(target + cell, tl.where(inside, now, before.to(now.dtype)), mask=here)


@operation
def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    *,
    silu: bool = False,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve a step's rows along their sequences, and leave the states at its stops; capturable.

    One launch where each sequence has one row, else two. Computed in float32, rounded to the weight's dtype before and
    after the activation. Rows of no sequence are zeros.

    Args:
        x: [T, C] of any row stride, or wider rows with `columns`.
        weight: [C, taps], contiguous. bias: [C] or None.
        states: [rows, C, kept], with cells side by side; `kept` is `taps` - 1 or more. Written.
        spans: the step's.
        silu: whether SiLU follows.
        columns: int32 [C], where in a row of x each channel is; None: in their order.

    Raises:
        BadInput: another shape or dtype.
    """
    rows, channels = _check(x, weight, bias, states, spans, columns)
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if not rows or not len(spans.sources):
        return out.zero_()
    single = spans.owners is None
    places = spans.sources if columns is None else columns
    blocks = triton.cdiv(channels, _CHANNELS)
    grid: Any = (rows, blocks)
    _conv_kernel[grid](
        x, places, weight, weight if bias is None else bias, states, out, spans.sources, spans.first_rows,
        spans.sources if spans.owners is None else spans.owners, spans.first_stops, spans.stops, x.stride(0),
        states.stride(0), states.stride(1), channels, taps=weight.shape[1], kept=states.shape[2],
        has_bias=bias is not None, silu=silu, single=single, mapped=columns is not None, cells=_CHANNELS, num_warps=2,
    )  # fmt: skip
    if not single:
        grid = (len(spans.sources), blocks)
        _keep_kernel[grid](
            x, places, states, spans.sources, spans.first_rows, spans.first_stops, spans.stops, x.stride(0),
            states.stride(0), states.stride(1), channels, kept=states.shape[2], mapped=columns is not None,
            cells=_CHANNELS, num_warps=2,
        )  # fmt: skip
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    columns: torch.Tensor | None,
) -> tuple[int, int]:
    """Rows and channels."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise BadInput("x", f"{tuple(x.shape)} of strides {x.stride()} where rows were expected")
    rows, channels = x.shape
    if columns is not None:
        if columns.dim() != 1 or columns.dtype is not torch.int32 or len(columns) > channels:
            raise BadInput("columns", f"{columns.dtype} {tuple(columns.shape)} of rows of {channels}")
        channels = len(columns)
    if weight.dim() != 2 or weight.shape[0] != channels or not weight.is_contiguous():
        raise BadInput("weight", f"{tuple(weight.shape)} where contiguous taps of {channels} channels were expected")
    if bias is not None and (tuple(bias.shape) != (channels,) or not bias.is_contiguous()):
        raise BadInput("bias", f"{tuple(bias.shape)} for {channels} channels")
    if states.dim() != 3 or states.shape[1] != channels or states.stride(2) != 1:
        raise BadInput("states", f"{tuple(states.shape)} where last inputs of {channels} channels were expected")
    if states.shape[2] < weight.shape[1] - 1:
        raise BadInput("states", f"{states.shape[2]} inputs are kept, for {weight.shape[1]} taps")
    expected = len(spans.sources) if spans.owners is None else len(spans.owners)
    if rows != expected:
        raise BadInput("x", f"{rows} rows, and the spans are of {expected}")
    return rows, channels
