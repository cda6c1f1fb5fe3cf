"""Drafts of a step on the device: the rows that verify them before the step, and how far they were right behind it.

How many tokens a sequence has is known on the device alone while a step is in flight, so two kernels work where the
tokens are: `place_drafts` follows each path to where its sequence is and makes the step's rows, `accept_drafts`
compares the samples with the drafts and moves the lengths. Both take one table of numbers, `RUN_COLUMNS`, a row for
each sequence. The rule is that of `fdasync.runner.drafts`. Knows no models and no sampling. Called by the plugins' GPU
runners. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

#: int64 columns of a sequence: its lane; its first row, and how many rows there are for it; the position of its first
#: row, or -1: the lane's length, on the device; the first position that its block table has no room for; its path
#: (place of the first token, number of tokens, position of the first one, most drafts to verify; -1 tokens: it is what
#: the device drafted behind the known tokens); first position of its noise
RUN_COLUMNS = ("lane", "row", "width", "start", "room", "path", "count", "from", "most", "noise")
_COLUMNS = len(RUN_COLUMNS)


@triton.jit(
    do_not_specialize=["span", "vocab_size", "token_stride", "float_stride"],
    do_not_specialize_on_alignment=[
        "runs", "paths", "noise", "lengths", "tokens", "drafted", "row_lanes", "row_starts", "row_counts", "floats",
        "out_starts", "out_used",
    ],
)  # fmt: skip
def _place_kernel(
    runs,
    paths,
    noise,
    lengths,
    tokens,
    drafted,
    row_lanes,
    row_starts,
    row_counts,
    floats,
    out_starts,
    out_used,
    span,
    vocab_size,
    token_stride,
    float_stride,
    num_lanes: tl.constexpr,
    max_tokens: tl.constexpr,
    draws: tl.constexpr,
    counts: tl.constexpr,
    owns: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
):
    sequence = tl.program_id(0)
    own = runs + sequence * columns
    lane = tl.load(own)
    row = tl.load(own + 1)
    rows = tl.load(own + 2)
    start = tl.load(own + 3)
    room = tl.load(own + 4)
    path = tl.load(own + 5)
    count = tl.load(own + 6)
    begin = tl.load(own + 7)
    most = tl.load(own + 8)
    first = tl.load(own + 9)
    here = (lane >= 0) & (lane < num_lanes)
    safe = tl.where(here, lane, 0)
    start = tl.where(start < 0, tl.load(lengths + safe).to(tl.int64), start)
    number = tl.arange(0, width).to(tl.int64)
    # the draft of the row behind this one: tokens for positions that the sequence has are passed over
    at = start + 1 - begin + number
    inside = (number < most) & (number + 1 < rows) & (at >= number) & (at < count)
    draft = tl.load(paths + path + at, mask=inside, other=-1).to(tl.int64)
    if owns:
        own_drafts = tl.where(here & (count < 0), tl.minimum(tl.load(drafted + safe).to(tl.int64), most), 0)
        is_own = (number < own_drafts) & (number + 1 < rows)
        guess = tl.load(tokens + safe * token_stride + start + 1 + number, mask=is_own, other=-1)
        draft = tl.where(is_own, guess.to(tl.int64), draft)
        inside |= is_own
    good = inside & (draft >= 0) & (draft < vocab_size)
    drafts = tl.min(tl.where(good, width, number), axis=0)
    free = tl.minimum(room, max_tokens) - start
    used = tl.minimum(tl.minimum(drafts + 1, rows), tl.maximum(free, 0))
    used = tl.where(here, used, 0)
    tl.store(tokens + safe * token_stride + start + 1 + number, draft.to(tl.int32), mask=number + 1 < used)
    mine = number < rows
    forwarded = number < used
    tl.store(row_lanes + row + number, tl.where(forwarded, lane, -1).to(tl.int32), mask=mine)
    tl.store(row_starts + row + number, tl.where(forwarded, start + number, 0), mask=mine)
    if counts:
        tl.store(row_counts + row + number, forwarded.to(tl.int32), mask=mine)
    if draws:
        place = start + 1 + number - first
        drawn = tl.load(noise + sequence * span + place, mask=forwarded & (place >= 0) & (place < span), other=0.0)
        tl.store(floats + (row + number) * float_stride, drawn, mask=mine)
    tl.store(out_starts + sequence, start.to(tl.int32))
    tl.store(out_used + sequence, used.to(tl.int32))


@triton.jit(
    do_not_specialize=["num_placed", "token_stride"],
    do_not_specialize_on_alignment=["runs", "samples", "lengths", "tokens", "placed", "used_rows", "out_counts"],
)
def _accept_kernel(
    runs,
    samples,
    lengths,
    tokens,
    placed,
    used_rows,
    out_counts,
    num_placed,
    token_stride,
    num_lanes: tl.constexpr,
    max_tokens: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
):
    sequence = tl.program_id(0)
    own = runs + sequence * columns
    lane = tl.load(own)
    row = tl.load(own + 1)
    rows = tl.load(own + 2)
    here = (lane >= 0) & (lane < num_lanes)
    safe = tl.where(here, lane, 0)
    # a sequence behind the placed ones has its one row where the host says
    is_placed = sequence < num_placed
    start = tl.load(placed + sequence, mask=is_placed, other=0).to(tl.int64)
    start = tl.where(is_placed, start, tl.load(own + 3))
    used = tl.load(used_rows + sequence, mask=is_placed, other=0).to(tl.int64)
    used = tl.where(here, tl.where(is_placed, used, rows), 0)
    number = tl.arange(0, width).to(tl.int64)
    cell = tokens + safe * token_stride + start + 1 + number
    sample = tl.load(samples + row + number, mask=number < used, other=-1).to(tl.int32)
    draft = tl.load(cell, mask=number + 1 < used, other=-1)
    right = (number + 1 < used) & (sample == draft)
    count = tl.minimum(tl.min(tl.where(right, width, number), axis=0) + 1, used)
    # the last sample of a context that is full is read by no step
    tl.store(cell, sample, mask=(number < count) & (start + 1 + number < max_tokens))
    tl.store(lengths + safe, (start + count).to(tl.int32), mask=here)
    tl.store(out_counts + sequence, count.to(tl.int32))


def place_drafts(
    runs: torch.Tensor,
    paths: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    vocab_size: int,
    most_rows: int,
    row_lanes: torch.Tensor,
    row_starts: torch.Tensor,
    row_counts: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    floats: torch.Tensor | None = None,
    drafted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the rows of S sequences that decode; one launch, no synchronising.

    A sequence's rows are its last token and the drafts behind it: its path's tokens for positions that it lacks, at
    most `most`, up to a token that is no id, and as far as its rows and its block table have room. The drafts are
    written to the known tokens, behind the last one. Rows left over are padding: lane -1, position 0.

    Args:
        runs: [S, 10] int64, `RUN_COLUMNS`. Rows of two sequences do not overlap.
        paths: [P] int32, at least one; any bits.
        lengths: [lanes] int32: the position of each lane's last token, whose KV is not there yet.
        tokens: [lanes, max_tokens] int32, of any row stride. Written.
        vocab_size: drafts from this on are no ids.
        most_rows: no sequence has more.
        row_lanes: [R] int32, written.
        row_starts: [R] int64, positions. Written.
        row_counts: [R] int32, written: 0 for padding, 1 for others; None: not wanted.
        noise: [S, span] float64, of the samples at positions `noise` and on; None: no row draws.
        floats: [J, 4] float64, of jobs (`sampling/tile.py`), the R rows' jobs first; their second column is written.
            With `noise`.
        drafted: [lanes] int32, how many drafts the device has written behind each lane's known tokens (by
            `own_drafts.py`); None: none, and no path is of -1 tokens.

    Returns:
        int32 [S] each: position of each sequence's first row, and how many of its rows are no padding.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_runs(runs, lengths, tokens)
    _check("paths", paths, (max(paths.numel(), 1),), torch.int32)
    _check("row_lanes", row_lanes, (row_lanes.numel(),), torch.int32)
    _check("row_starts", row_starts, (row_lanes.numel(),), torch.int64)
    if row_counts is not None:
        _check("row_counts", row_counts, (row_lanes.numel(),), torch.int32)
    if drafted is not None:
        _check("drafted", drafted, (len(lengths),), torch.int32)
    if noise is not None:
        _check("noise", noise, (count, noise.shape[-1]), torch.float64)
        if floats is None or floats.dim() != 2 or floats.dtype is not torch.float64 or len(floats) < row_lanes.numel():
            raise BadInput("floats", "noise has no place of float64 numbers for each row")
    starts = torch.empty(count, dtype=torch.int32, device=runs.device)
    used = torch.empty_like(starts)
    if count:
        draws = noise is not None and floats is not None
        grid: Any = (count,)
        _place_kernel[grid](
            runs,
            paths,
            noise if noise is not None else runs,
            lengths,
            tokens,
            drafted if drafted is not None else lengths,
            row_lanes,
            row_starts,
            row_counts if row_counts is not None else runs,
            floats[:, 1] if floats is not None else runs,
            starts,
            used,
            noise.shape[1] if noise is not None else 0,
            vocab_size,
            tokens.stride(0),
            floats.stride(0) if floats is not None else 0,
            num_lanes=len(lengths),
            max_tokens=tokens.shape[1],
            draws=draws,
            counts=row_counts is not None,
            owns=drafted is not None,
            columns=_COLUMNS,
            width=_width(most_rows),
            num_warps=1,
        )
    return starts, used


def accept_drafts(
    runs: torch.Tensor,
    samples: torch.Tensor,
    placed: torch.Tensor,
    used: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    most_rows: int,
) -> torch.Tensor:
    """Keep the samples of each sequence up to and including the first that differs from its draft; one launch.

    They are written to the known tokens, and the lanes' lengths move behind them.

    Args:
        runs: [N, 10] int64: the runs that `place_drafts` took, and behind them sequences with one row at their `start`.
        samples: [R] int64, of each row.
        placed, used: as `place_drafts` gave.
        lengths, tokens, most_rows: as `place_drafts` took. The tensors are written.

    Returns:
        int32 [N], how many samples of each sequence stand; 0 where no row was forwarded.

    Raises:
        BadInput: another shape or dtype.
    """
    count = _check_runs(runs, lengths, tokens)
    _check("samples", samples, (samples.numel(),), torch.int64)
    _check("placed", placed, (placed.numel(),), torch.int32)
    _check("used", used, (placed.numel(),), torch.int32)
    counts = torch.empty(count, dtype=torch.int32, device=runs.device)
    if count:
        grid: Any = (count,)
        _accept_kernel[grid](
            runs,
            samples,
            lengths,
            tokens,
            placed,
            used,
            counts,
            placed.numel(),
            tokens.stride(0),
            num_lanes=len(lengths),
            max_tokens=tokens.shape[1],
            columns=_COLUMNS,
            width=_width(most_rows),
            num_warps=1,
        )
    return counts


def _width(most_rows: int) -> int:
    return int(max(2, triton.next_power_of_2(most_rows)))


def _check_runs(runs: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> int:
    _check("runs", runs, (len(runs), _COLUMNS), torch.int64)
    _check("lengths", lengths, (len(tokens),), torch.int32)
    if tokens.dim() != 2 or tokens.dtype is not torch.int32 or tokens.stride(1) != 1:
        raise BadInput("tokens", f"{tokens.dtype} {tuple(tokens.shape)} where int32 rows were expected")
    return len(runs)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise BadInput(name, f"{found} where contiguous {dtype} {shape} was expected")
