"""Drafts that a model's own layers make on the device: the rows of their passes, and where the drafts go.

A drafting pass has one sampled token behind it whose position only the device knows. `draft_rows` makes its rows from
the lanes' lengths, `draft_noise` finds the noise of what it samples, and `take_drafts` writes the sampled drafts behind
the known tokens, where the next step's `place_drafts` finds them. Knows no models and no sampling. Called by the
plugins' GPU runners. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_ROWS = 64


@triton.jit(
    do_not_specialize=["num_sequences", "most"],
    do_not_specialize_on_alignment=["lanes", "rooms", "lengths", "drafted"],
)
def _room_kernel(
    lanes, rooms, lengths, drafted, num_sequences, most,
    max_tokens: tl.constexpr, num_lanes: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * rows + tl.arange(0, rows)
    here = number < num_sequences
    lane = tl.load(lanes + number, mask=here, other=-1)
    here = here & (lane >= 0) & (lane < num_lanes)
    safe = tl.where(here, lane, 0)
    length = tl.load(lengths + safe)
    # the KV of the row, and the draft behind it
    free = tl.minimum(tl.load(rooms + number, mask=here, other=0), max_tokens - 1) - length
    tl.store(drafted + safe, tl.minimum(tl.maximum(free, 0), most).to(tl.int32), mask=here)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["lanes", "lengths", "drafted", "out_lanes", "out_starts"],
)
def _rows_kernel(
    lanes, lengths, drafted, out_lanes, out_starts, num_rows,
    depth: tl.constexpr, each: tl.constexpr, num_lanes: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    here = row < num_rows
    lane = tl.load(lanes + row // each, mask=here, other=-1)
    used = here & (lane >= 0) & (lane < num_lanes)
    safe = tl.where(used, lane, 0)
    used = used & (depth < tl.load(drafted + safe))
    position = tl.load(lengths + safe).to(tl.int64) + depth + 1 - each + row % each
    tl.store(out_lanes + row, tl.where(used, lane, -1), mask=here)
    tl.store(out_starts + row, tl.where(used, position, 0), mask=here)


@triton.jit(
    do_not_specialize=["num_sequences", "span", "depth", "float_stride"],
    do_not_specialize_on_alignment=["lanes", "noise", "first", "lengths", "floats"],
)
def _noise_kernel(
    lanes, noise, first, lengths, floats, num_sequences, span, depth, float_stride,
    num_lanes: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * rows + tl.arange(0, rows)
    here = number < num_sequences
    lane = tl.load(lanes + number, mask=here, other=-1)
    used = here & (lane >= 0) & (lane < num_lanes)
    place = tl.load(lengths + tl.where(used, lane, 0)).to(tl.int64) + 1 + depth
    place -= tl.load(first + number, mask=here, other=0)
    drawn = tl.load(noise + number * span + place, mask=used & (place >= 0) & (place < span), other=0.0)
    tl.store(floats + number * float_stride, drawn, mask=here)


@triton.jit(
    do_not_specialize=["num_sequences", "depth", "token_stride"],
    do_not_specialize_on_alignment=["lanes", "lengths", "drafted", "samples", "tokens"],
)
def _take_kernel(
    lanes, lengths, drafted, samples, tokens, num_sequences, depth, token_stride,
    num_lanes: tl.constexpr, max_tokens: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * rows + tl.arange(0, rows)
    here = number < num_sequences
    lane = tl.load(lanes + number, mask=here, other=-1)
    used = here & (lane >= 0) & (lane < num_lanes)
    safe = tl.where(used, lane, 0).to(tl.int64)
    used = used & (depth < tl.load(drafted + safe))
    place = tl.load(lengths + safe).to(tl.int64) + 1 + depth
    sample = tl.load(samples + number, mask=here, other=-1).to(tl.int32)
    tl.store(tokens + safe * token_stride + place, sample, mask=used & (place < max_tokens))


def draft_room(
    lanes: torch.Tensor, rooms: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, most: int, max_tokens: int
) -> None:
    """How many drafts each sequence gets: `most`, or as many as its table has room for; one launch.

    A draft needs room for the KV of the token before it, and for itself among the known tokens.

    Args:
        lanes: int32 [D]; -1: padding.
        rooms: int64 [D], the first position that each block table has no room for.
        lengths: int32 [lanes], position of the last known token.
        drafted: int32 [lanes]. Written for these lanes.
        most: at least 0.
        max_tokens: of a lane.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_lanes(lanes, lengths, drafted)
    _check("rooms", rooms, count, torch.int64)
    if count:
        grid: Any = (triton.cdiv(count, _ROWS),)
        _room_kernel[grid](
            lanes, rooms, lengths, drafted, count, most, max_tokens=max_tokens, num_lanes=len(lengths),
            rows=_ROWS, num_warps=1,
        )  # fmt: skip


def draft_rows(
    lanes: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, depth: int, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a pass that drafts: `each` of every sequence, up to `depth` positions behind its last known token.

    One launch, capturable. Padding (lane -1, position 0) where a sequence has no draft of this depth.

    Args:
        lanes, lengths, drafted: as `draft_room`.
        depth: of the draft that comes of the last row, from 0.
        each: 1 to `depth` + 1.

    Returns:
        int32 [D * each] lanes and int64 positions, for `step_layout`.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_lanes(lanes, lengths, drafted)
    if not 1 <= each <= depth + 1:
        raise BadInput("each", f"{each} rows at depth {depth}")
    out_lanes = torch.empty(count * each, dtype=torch.int32, device=lanes.device)
    out_starts = torch.empty(count * each, dtype=torch.int64, device=lanes.device)
    if count:
        grid: Any = (triton.cdiv(count * each, _ROWS),)
        _rows_kernel[grid](
            lanes, lengths, drafted, out_lanes, out_starts, count * each, depth=depth, each=each,
            num_lanes=len(lengths), rows=_ROWS, num_warps=1,
        )  # fmt: skip
    return out_lanes, out_starts


def draft_noise(
    lanes: torch.Tensor,
    noise: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    depth: int,
    floats: torch.Tensor,
) -> None:
    """Put the noise of the drafts of a depth into their jobs; one launch.

    Args:
        lanes, lengths, depth: as `draft_rows`.
        noise: float64 [D, span], of positions from `first` on.
        first: int64 [D].
        floats: float64 [J, 4] of jobs (`sampling/tile.py`), the D drafts' jobs first; their second column is written.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_lanes(lanes, lengths, lengths)
    _check("first", first, count, torch.int64)
    if noise.dim() != 2 or len(noise) != count or noise.dtype is not torch.float64 or not noise.is_contiguous():
        raise BadInput("noise", f"{noise.dtype} {tuple(noise.shape)} of {count} sequences")
    if floats.dim() != 2 or floats.dtype is not torch.float64 or len(floats) < count:
        raise BadInput("floats", f"{floats.dtype} {tuple(floats.shape)} has no place for {count} drafts")
    if count:
        grid: Any = (triton.cdiv(count, _ROWS),)
        _noise_kernel[grid](
            lanes, noise, first, lengths, floats[:, 1], count, noise.shape[1], depth, floats.stride(0),
            num_lanes=len(lengths), rows=_ROWS, num_warps=1,
        )  # fmt: skip


def take_drafts(
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    drafted: torch.Tensor,
    depth: int,
    samples: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Write the drafts of a depth behind the known tokens; one launch.

    Args:
        lanes, lengths, drafted, depth: as `draft_rows`.
        samples: int64 or int32 [D].
        tokens: int32 [lanes, max_tokens], of any row stride. Written.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_lanes(lanes, lengths, drafted)
    if samples.numel() != count or not samples.is_contiguous():
        raise BadInput("samples", f"{tuple(samples.shape)} of {count} sequences")
    if tokens.dim() != 2 or tokens.dtype is not torch.int32 or tokens.stride(1) != 1 or len(tokens) != len(lengths):
        raise BadInput("tokens", f"{tokens.dtype} {tuple(tokens.shape)} where int32 rows were expected")
    if count:
        grid: Any = (triton.cdiv(count, _ROWS),)
        _take_kernel[grid](
            lanes, lengths, drafted, samples, tokens, count, depth, tokens.stride(0), num_lanes=len(lengths),
            max_tokens=tokens.shape[1], rows=_ROWS, num_warps=1,
        )  # fmt: skip


def _check_lanes(lanes: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor) -> int:
    count = lanes.numel()
    _check("lanes", lanes, count, torch.int32)
    _check("lengths", lengths, lengths.numel(), torch.int32)
    _check("drafted", drafted, lengths.numel(), torch.int32)
    return count


def _check(name: str, tensor: torch.Tensor, count: int, dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != (count,) or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise BadInput(name, f"{tensor.dtype} {tuple(tensor.shape)} where contiguous {dtype} [{count}] was expected")
