"""Hidden states of the position before: what multi-token prediction layers take beside a token.

A layer's row of position p takes the state of p - 1. In a step that is the row before, and for a sequence's first row
what the last step left of the sequence. `shift_states` brings both together, and `keep_states` leaves the states of the
last positions that stand: of each sequence, and of each KV block. Rows are as in `step_layout`. Knows no models. Called
by the plugins' GPU runners. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_CELLS = 1024


@triton.jit
def _row(
    row, lanes, starts, first_rows, num_sequences, rounds, num_lanes: tl.constexpr, max_tokens: tl.constexpr
):  # fmt: skip
    """Lane and position of a row, and whether it is one; whether the row before is of the position before."""
    low = row * 0
    high = low + num_sequences
    while rounds > 0:
        middle = (low + high) // 2
        begun = tl.load(first_rows + middle) <= row
        open_ = low + 1 < high
        low = tl.where(open_ & begun, middle, low)
        high = tl.where(open_ & (begun == 0), middle, high)
        rounds -= 1
    begin = tl.load(first_rows + low)
    lane = tl.load(lanes + low)
    position = tl.load(starts + low) + (row - begin)
    used = (row >= begin) & (row < tl.load(first_rows + num_sequences)) & (lane >= 0) & (lane < num_lanes)
    used = used & (position >= 0) & (position < max_tokens)
    # a sequence may have several entries side by side, of one row each
    before = tl.maximum(low - 1, 0)
    last = tl.load(starts + before) + (begin - 1 - tl.load(first_rows + before))
    follows = (low > 0) & (tl.load(lanes + before) == lane) & (last == position - 1)
    return lane, position, used, (row > begin) | follows


@triton.jit(
    do_not_specialize=["num_sequences", "rounds"],
    do_not_specialize_on_alignment=["states", "kept", "lanes", "starts", "first_rows", "out"],
)
def _shift_kernel(
    states, kept, lanes, starts, first_rows, out, num_sequences, rounds, kept_lane,
    num_lanes: tl.constexpr, max_tokens: tl.constexpr, width: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane, position, used, follows = _row(row, lanes, starts, first_rows, num_sequences, rounds, num_lanes, max_tokens)
    cell = tl.program_id(1) * cells + tl.arange(0, cells)
    source = states + (row - 1).to(tl.int64) * width
    inner = tl.load(source + cell, mask=cell < tl.where(used & follows, width, 0), other=0.0)
    source = kept + tl.where(used, lane, 0).to(tl.int64) * kept_lane
    outside = used & (follows == 0) & (position > 0)
    outer = tl.load(source + cell, mask=cell < tl.where(outside, width, 0), other=0.0)
    # one of them is 0
    tl.store(out + row.to(tl.int64) * width + cell, inner + outer, mask=cell < width)


@triton.jit(
    do_not_specialize=["num_rows", "num_runs", "num_sequences", "rounds", "table_stride"],
    do_not_specialize_on_alignment=[
        "states", "lengths", "lanes", "starts", "first_rows", "tables", "kept", "carried",
    ],
)  # fmt: skip
def _keep_kernel(
    states, lengths, lanes, starts, first_rows, tables, kept, carried, num_rows, num_runs, num_sequences, rounds,
    table_stride, kept_lane, block_stride, token_stride, share_stride,
    begin: tl.constexpr, least: tl.constexpr, stop: tl.constexpr, shares: tl.constexpr, first_share: tl.constexpr,
    held_shares: tl.constexpr, share_width: tl.constexpr, num_lanes: tl.constexpr, max_tokens: tl.constexpr,
    block_tokens: tl.constexpr, width: tl.constexpr, cells: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane, position, used, _follows = _row(row, lanes, starts, first_rows, num_sequences, rounds, num_lanes, max_tokens)
    safe = tl.where(used, lane, 0).to(tl.int64)
    length = tl.load(lengths + safe)
    stands = used & ((row >= num_runs) | (position < length))
    if stands:
        # whether the row behind is this sequence's next position, and stands
        next_row = tl.minimum(row + 1, num_rows - 1)
        next_lane, next_position, next_used, next_follows = _row(
            next_row, lanes, starts, first_rows, num_sequences, rounds, num_lanes, max_tokens
        )
        goes_on = (row + 1 < num_rows) & next_used & next_follows & (next_lane == lane)
        goes_on = goes_on & ((next_row >= num_runs) | (next_position < length))
        ends_block = (position + 1) % block_tokens == 0
        if (goes_on == 0) | ends_block:
            cell = tl.program_id(1) * cells + tl.arange(0, cells)
            state = tl.load(states + row.to(tl.int64) * width + cell, mask=cell < width, other=0.0)
            # a layer has none of the first positions
            state = tl.where(position >= least, state, 0.0)
            if goes_on == 0:
                tl.store(kept + safe * kept_lane + cell, state, mask=cell < width)
            block = tl.load(tables + safe * table_stride + position // block_tokens).to(tl.int64)
            # the cells of a block, token after token and share after share
            place = begin + cell
            share = place // share_width % shares - first_share
            target = carried + block * block_stride + place // (share_width * shares) * token_stride
            target += share * share_stride + place % share_width
            here = (place < stop) & (share >= 0) & (share < held_shares)
            tl.store(target, state, mask=here)


def shift_states(
    states: torch.Tensor,
    kept: torch.Tensor,
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    """For each row of a step the state of the position before it, [T, D]; one launch, no synchronising, capturable.

    Zeros for padding and for the first position of a sequence.

    Args:
        states: [T, D], contiguous: of the step's rows.
        kept: [lanes, D], of any lane stride: of the last position of each lane before this step.
        lanes, starts, first_rows: as `step_layout` takes. Rows of a lane that stand side by side at positions that do
            are one run, also where each is an entry of its own.
        max_tokens: of a lane; rows at or past it are padding.

    Raises:
        BadInput: another shape or dtype.
    """
    rows, width = _check_rows(states, lanes, starts, first_rows)
    if kept.dim() != 2 or kept.shape[1] != width or kept.stride(1) != 1 or kept.dtype is not states.dtype:
        raise BadInput("kept", f"{kept.dtype} {tuple(kept.shape)} of any lane, for states of {width}")
    out = torch.empty_like(states)
    if rows:
        grid: Any = (rows, triton.cdiv(width, _CELLS))
        _shift_kernel[grid](
            states, kept, lanes, starts, first_rows, out, lanes.numel(), lanes.numel().bit_length(), kept.stride(0),
            num_lanes=len(kept), max_tokens=max_tokens, width=width, cells=_CELLS, num_warps=4,
        )  # fmt: skip
    return out


def keep_states(
    states: torch.Tensor,
    depth: int,
    lengths: torch.Tensor,
    num_runs: int,
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tables: torch.Tensor,
    kept: torch.Tensor,
    carried: torch.Tensor,
    *,
    shares: int,
    first_share: int,
    block_tokens: int,
) -> None:
    """Write the states of the last positions that stand; one launch, no synchronising.

    A sequence's states go to `kept`, and those of each block that the step reached to the block: D cells from `depth` *
    D on, which stand token after token and share after share. Zeros where a position is before `depth`; the last
    depth's cells go on with zeros to the end of the block.

    Args:
        states: [T, D], contiguous: of the step's rows.
        depth: which of the states of a position these are, from 0.
        lengths: int32 [lanes]: of the first `num_runs` rows, those stand whose position is before their lane's length.
            All others stand.
        lanes, starts, first_rows, tables: as `step_layout` takes.
        kept: [lanes, depths, D]. Written.
        carried: [blocks, block_tokens, held shares, 1, cells] of any stride but in its last dimension. Written.
        shares, first_share: of a block in all, and the first that is here.
        block_tokens: tokens of a block.

    Raises:
        BadInput: another shape or dtype.
    """
    rows, width = _check_rows(states, lanes, starts, first_rows)
    depths = kept.shape[1] if kept.dim() == 3 else 0
    if not 0 <= depth < depths or kept.shape[2] != width or not kept.is_contiguous() or kept.dtype is not states.dtype:
        raise BadInput("kept", f"{kept.dtype} {tuple(kept.shape)}, for depth {depth} of states of {width}")
    if carried.dim() != 5 or carried.stride(4) != 1 or carried.shape[1] != block_tokens or carried.shape[3] != 1:
        raise BadInput("carried", f"{tuple(carried.shape)} are not the cells of blocks of {block_tokens} tokens")
    held, share_width = carried.shape[2], carried.shape[4]
    total = block_tokens * shares * share_width
    if total < depths * width or not 0 <= first_share <= shares - held:
        raise BadInput("carried", f"{total} cells of a block, {depths * width} are needed")
    if tables.dim() != 2 or tables.dtype is not torch.int32 or tables.stride(1) != 1 or len(tables) != len(kept):
        raise BadInput("tables", f"{tables.dtype} {tuple(tables.shape)} where int32 rows were expected")
    if lengths.dtype is not torch.int32 or len(lengths) != len(kept):
        raise BadInput("lengths", f"{lengths.dtype} {tuple(lengths.shape)} of {len(kept)} lanes")
    stop = total if depth == depths - 1 else (depth + 1) * width
    if rows:
        grid: Any = (rows, triton.cdiv(stop - depth * width, _CELLS))
        _keep_kernel[grid](
            states, lengths, lanes, starts, first_rows, tables, kept[:, depth], carried, rows, num_runs, lanes.numel(),
            lanes.numel().bit_length(), tables.stride(0), kept.stride(0), carried.stride(0), carried.stride(1),
            carried.stride(2), begin=depth * width, least=depth, stop=stop, shares=shares, first_share=first_share,
            held_shares=held, share_width=share_width, num_lanes=len(kept),
            max_tokens=tables.shape[1] * block_tokens, block_tokens=block_tokens, width=width, cells=_CELLS,
            num_warps=4,
        )  # fmt: skip


def _check_rows(
    states: torch.Tensor, lanes: torch.Tensor, starts: torch.Tensor, first_rows: torch.Tensor
) -> tuple[int, int]:
    """Rows and width."""
    if states.dim() != 2 or not states.is_contiguous():
        raise BadInput("states", f"{tuple(states.shape)} where contiguous rows were expected")
    sequences = lanes.numel()
    for name, tensor, count, dtype in (
        ("lanes", lanes, max(sequences, 1), torch.int32),
        ("starts", starts, sequences, torch.int64),
        ("first_rows", first_rows, sequences + 1, torch.int32),
    ):
        if tuple(tensor.shape) != (count,) or tensor.dtype is not dtype or not tensor.is_contiguous():
            raise BadInput(
                name, f"{tensor.dtype} {tuple(tensor.shape)} where contiguous {dtype} [{count}] was expected"
            )
    return len(states), states.shape[1]
