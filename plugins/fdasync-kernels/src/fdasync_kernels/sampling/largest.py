"""The largest logit of each row: all that greedy rows without edits need.

A library finds it by five kernels, and looks for bad rows with four of them. Here one kernel finds the largest of each
tile and one the largest of each row; both keep value and id in one whole number, so ties go to the lowest id. Knows no
requests. Called by the plugins' samplers. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import operation
from fdasync_kernels.sampling.tile import NOTHING, TILE, id_of, order_of, value_of


@triton.jit
def _best_tiles_kernel(logits, stride, width, tile_best, tiles, tile: tl.constexpr, OVERLAP: tl.constexpr):
    """A program finds the largest logit of a tile of one row; NaN counts as +inf."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0)
    ids = number * tile + tl.arange(0, tile)
    x = tl.load(logits + row * stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, axis=0)
    lowest = tl.min(tl.where((x == best) & (ids < width), ids, width), axis=0)
    tl.store(tile_best + row * tiles + number, order_of(best, lowest, width))


@triton.jit
def _best_rows_kernel(tile_best, tokens, finite, tiles, padded: tl.constexpr, OVERLAP: tl.constexpr):
    """A program finds the largest of a row's tiles."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded)
    best = tl.max(tl.load(tile_best + row * tiles + number, mask=number < tiles, other=NOTHING), axis=0)
    tl.store(tokens + row, id_of(best).to(tl.int64))
    tl.store(finite + row, tl.abs(value_of(best)) < float("inf"))


@operation
def largest_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The id of each row's largest logit, the lowest among equal ones; and whether that logit is finite.

    Two launches on the current stream, without synchronising. The number of rows compiles nothing anew.

    Args:
        logits: [N, V] bfloat16, float16 or float32; rows may be strided, a row may not. Read.

    Returns:
        int64 [N], within the vocabulary whatever the logits are, and bool [N]: False where a row has NaN or +inf, or
        nothing finite. New tensors on the device of `logits`.

    Raises:
        BadInput: logits without a vocabulary, or of strides that the kernels do not take.
    """
    if logits.dim() != 2 or not logits.shape[1] or logits.stride(1) != 1:
        raise BadInput("logits", f"shape {tuple(logits.shape)} with strides {logits.stride()} is no table of rows")
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        tiles = triton.cdiv(width, TILE)
        best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
        # the stride of a single row may be anything in torch
        stride = logits.stride(0) if rows > 1 else width
        launch = overlap(logits.device)
        _best_tiles_kernel[(tiles, rows)](logits, stride, width, best, tiles, tile=TILE, num_warps=4, **launch)
        _best_rows_kernel[(rows,)](
            best, tokens, finite, tiles, padded=triton.next_power_of_2(tiles), num_warps=1, **launch
        )  # fmt: skip
    return tokens, finite
