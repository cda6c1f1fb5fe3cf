"""Rows of a table by position: the cosines and sines of a rotary embedding whose frequencies never change.

A library computes them anew in every step, by ten small kernels. Here one kernel reads them. Knows no models and no
frequencies. Called by the plugins' fused modules. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.overlap import overlap, wait_for_inputs


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles_kernel(table, positions, out, ROWS, WIDTH: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    """A program copies the row of one position."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    position = tl.load(positions + row)
    known = position < ROWS
    at = tl.minimum(tl.maximum(position, 0), ROWS - 1) * WIDTH + column
    values = tl.load(table + at, mask=inside, other=0.0)
    values = tl.where(known, values, float("nan"))
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)


def angles_at(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of `table` at `positions`: one launch on the current stream, which a graph can capture; T compiles nothing.

    Args:
        table: [P, W], contiguous, any float dtype. Read.
        positions: int64 [T], contiguous. A negative one (padding) gets row 0; one past the table gets NaN, which the
            step's check of logits finds. Read.

    Returns:
        [T, W], new, of the dtype of `table`.

    Raises:
        BadInput: a table or positions that the kernel does not take.
    """
    if table.dim() != 2 or not table.numel() or not table.is_contiguous() or not table.is_floating_point():
        raise BadInput("table", f"{table.dtype} {tuple(table.shape)} is no contiguous table of floats")
    if positions.dim() != 1 or positions.dtype is not torch.int64 or not positions.is_contiguous():
        raise BadInput("positions", f"{positions.dtype} {tuple(positions.shape)} where int64 [T] was expected")
    rows, width = table.shape
    out = torch.empty((len(positions), width), dtype=table.dtype, device=table.device)
    if len(positions):
        _angles_kernel[(len(positions),)](
            table, positions, out, rows, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=1,
            **overlap(table.device),
        )  # fmt: skip
    return out
