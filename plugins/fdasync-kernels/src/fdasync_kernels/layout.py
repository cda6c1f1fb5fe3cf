"""Positions, token ids and KV slots of a step's rows: one kernel computes them from a few numbers a sequence.

The host sends a step as (lane, start, first row) per sequence; tokens and block tables stay on the device, kept up
to date by `scatter_updates`. So the host's work for a step does not grow with its tokens, and a sampled token need not
come to the host before the next step. Knows no models and no sampling. Called by the plugins' GPU runners.
Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_ROWS = 64
_UPDATES = 128


@triton.jit(
    do_not_specialize=["num_rows", "num_sequences", "rounds", "table_stride", "token_stride"],
    do_not_specialize_on_alignment=[
        "lanes",
        "starts",
        "first_rows",
        "tables",
        "tokens",
        "out_positions",
        "out_ids",
        "out_slots",
    ],
)
def _step_layout_kernel(
    lanes,
    starts,
    first_rows,
    tables,
    tokens,
    out_positions,
    out_ids,
    out_slots,
    num_rows,
    num_sequences,
    rounds,
    table_stride,
    token_stride,
    num_lanes: tl.constexpr,
    max_blocks: tl.constexpr,
    max_tokens: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    here = row < num_rows
    # the last sequence that begins at or before the row, by halving: the same few loads for every row, so the cost
    # grows with the logarithm of the sequences only, and a step of one long sequence is as parallel as any
    low = tl.zeros((rows,), dtype=tl.int32)
    high = tl.zeros((rows,), dtype=tl.int32) + num_sequences
    while rounds > 0:
        middle = (low + high) // 2
        begun = tl.load(first_rows + middle) <= row
        open_ = low + 1 < high
        low = tl.where(open_ & begun, middle, low)
        high = tl.where(open_ & (begun == 0), middle, high)
        rounds -= 1
    end = tl.load(first_rows + num_sequences)
    lane = tl.load(lanes + low)
    begin = tl.load(first_rows + low)
    position = tl.load(starts + low) + (row - begin)
    used = here & (row < end) & (row >= begin) & (lane >= 0) & (lane < num_lanes)
    # a position outside the tables is a defect of the caller; it must not become a read outside them
    used = used & (position >= 0) & (position < max_tokens) & (position < max_blocks * block_tokens)
    position = tl.where(used, position, 0)
    safe = tl.where(used, lane, 0).to(tl.int64)
    block = tl.load(tables + safe * table_stride + position // block_tokens, mask=used, other=0).to(tl.int64)
    token = tl.load(tokens + safe * token_stride + position, mask=used, other=0).to(tl.int64)
    slot = tl.where(used, block * block_tokens + position % block_tokens, -1)
    tl.store(out_positions + row, position, mask=here)
    tl.store(out_ids + row, token, mask=here)
    tl.store(out_slots + row, slot, mask=here)


@triton.jit(
    do_not_specialize=["num_updates", "num_cells"],
    do_not_specialize_on_alignment=["target", "index", "value"],
)
def _scatter_kernel(
    target,
    index,
    value,
    num_updates,
    num_cells,
    updates: tl.constexpr,
):
    number = tl.program_id(0) * updates + tl.arange(0, updates)
    here = number < num_updates
    cell = tl.load(index + number, mask=here, other=-1)
    new = tl.load(value + number, mask=here, other=0)
    tl.store(target + cell, new, mask=(cell >= 0) & (cell < num_cells))


def step_layout(
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tables: torch.Tensor,
    tokens: torch.Tensor,
    block_tokens: int,
    out_positions: torch.Tensor,
    out_ids: torch.Tensor,
    out_slots: torch.Tensor,
) -> None:
    """Fill position, token id and KV slot of every token row of a step; one launch, no synchronising, capturable.

    Row t belongs to the last sequence s with first_rows[s] <= t. Its position is starts[s] + t - first_rows[s], its
    id tokens[lane, position], its slot the place of that position in the KV pool:
    tables[lane, position // block_tokens] * block_tokens + position % block_tokens.
    Padding is a row at or past first_rows[S], or of a sequence whose lane is negative: position 0, id 0, slot -1. A
    position that no table holds is treated alike. Neither T nor S compiles anything anew. All tensors are the
    caller's, on one device, contiguous but for the rows of the two tables, and in use until the stream has passed.

    Args:
        lanes: [S] int32, row of the tables of each sequence; S is at least 1.
        starts: [S] int64, position of the sequence's first row.
        first_rows: [S + 1] int32, not falling, first_rows[0] = 0; the last is the number of rows in use.
        tables: [lanes, max_blocks] int32.
        tokens: [lanes, max_tokens] int32.
        block_tokens: tokens of a block.
        out_positions, out_ids, out_slots: [T] int64 each. Written.

    Raises:
        BadInput: another shape or dtype.
    """
    sequences, rows = lanes.numel(), out_positions.numel()
    _check("lanes", lanes, (max(sequences, 1),), torch.int32)
    _check("starts", starts, (sequences,), torch.int64)
    _check("first_rows", first_rows, (sequences + 1,), torch.int32)
    _check("out_positions", out_positions, (rows,), torch.int64)
    _check("out_ids", out_ids, (rows,), torch.int64)
    _check("out_slots", out_slots, (rows,), torch.int64)
    for name, table in (("tables", tables), ("tokens", tokens)):
        if table.dim() != 2 or table.dtype is not torch.int32 or table.stride(1) != 1:
            raise BadInput(name, f"{table.dtype} {tuple(table.shape)} where int32 rows were expected")
    if len(tables) != len(tokens):
        raise BadInput("tables", f"{len(tables)} lanes, and tokens has {len(tokens)}")
    if block_tokens < 1:
        raise BadInput("block_tokens", f"{block_tokens} tokens in a block", limit=1)
    if not rows:
        return
    grid: Any = (triton.cdiv(rows, _ROWS),)
    _step_layout_kernel[grid](
        lanes,
        starts,
        first_rows,
        tables,
        tokens,
        out_positions,
        out_ids,
        out_slots,
        rows,
        sequences,
        sequences.bit_length(),
        tables.stride(0),
        tokens.stride(0),
        num_lanes=len(tables),
        max_blocks=tables.shape[1],
        max_tokens=tokens.shape[1],
        block_tokens=block_tokens,
        rows=_ROWS,
        num_warps=2,
    )


def scatter_updates(target_flat: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """target_flat[index[i]] = value[i] where index[i] is in range, in place; one launch, capturable.

    An index below 0 (padding) or past the end is skipped. An index that is there twice gets one of its values.

    Args:
        target_flat: [cells] int32, contiguous. Written.
        index: [n] int64, contiguous.
        value: [n] int32, contiguous.

    Raises:
        BadInput: another shape or dtype.
    """
    count = index.numel()
    _check("target_flat", target_flat, (target_flat.numel(),), torch.int32)
    _check("index", index, (count,), torch.int64)
    _check("value", value, (count,), torch.int32)
    if not count or not target_flat.numel():
        return
    grid: Any = (triton.cdiv(count, _UPDATES),)
    _scatter_kernel[grid](target_flat, index, value, count, target_flat.numel(), updates=_UPDATES, num_warps=1)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise BadInput(name, f"{found} where contiguous {dtype} {shape} was expected")
