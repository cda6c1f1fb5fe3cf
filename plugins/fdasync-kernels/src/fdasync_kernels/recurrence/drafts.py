"""States of sequences whose steps verify drafts: which version a step begins from, and which it leaves.

A lane has `versions` rows of the states' memory, side by side, one more than a step has rows of a sequence. One of them
is current; a step leaves the state behind each of its rows in the next versions, in a ring, so the version that it
begins from is never overwritten. Only the device knows how many rows stand, and so which version is current from then
on. So three kernels work where that is known: `place_states` before the step, `keep_states` and `accept_states` behind
its samples. Knows no models and no drafts. Called by the plugins' GPU runners. Runs on CUDA, or on the CPU under
Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync_kernels.recurrence.spans import Spans

_WORDS = 4096


@triton.jit(
    do_not_specialize_on_alignment=["sources", "first_stops", "stops", "current"],
)  # fmt: skip
def _place_kernel(sources, first_stops, stops, current, versions):
    sequence = tl.program_id(0)
    base = tl.load(sources + sequence)
    now = tl.load(current + base // versions)
    tl.store(sources + sequence, base + now)
    for stop in range(tl.load(first_stops + sequence), tl.load(first_stops + sequence + 1)):
        ahead = tl.load(stops + 2 * stop + 1) - base
        tl.store(stops + 2 * stop + 1, base + (now + ahead) % versions)


@triton.jit(
    do_not_specialize=["runs_row"],
    do_not_specialize_on_alignment=["takes", "runs", "starts", "counts", "current", "memory"],
)
def _keep_kernel(
    takes, runs, starts, counts, current, memory, versions, runs_row, words, cells: tl.constexpr
):  # fmt: skip
    take = tl.program_id(0)
    number = tl.load(takes + 3 * take)
    behind = tl.load(takes + 3 * take + 1) - tl.load(starts + number)
    if (behind > 0) & (behind <= tl.load(counts + number)):
        lane = tl.load(runs + number * runs_row)
        source = lane * versions + (tl.load(current + lane) + behind) % versions
        at = tl.program_id(1) * cells + tl.arange(0, cells)
        held = tl.load(memory + source * words + at, mask=at < words)
        tl.store(memory + tl.load(takes + 3 * take + 2) * words + at, held, mask=at < words)


@triton.jit(
    do_not_specialize=["runs_row"],
    do_not_specialize_on_alignment=["runs", "counts", "current"],
)
def _accept_kernel(runs, counts, current, versions, runs_row):
    sequence = tl.program_id(0)
    lane = tl.load(runs + sequence * runs_row)
    now = tl.load(current + lane) + tl.load(counts + sequence)
    tl.store(current + lane, now % versions)


def place_states(spans: Spans, decodes: int, current: torch.Tensor, versions: int) -> None:
    """Queue the places of the states of a step's first `decodes` spans.

    Args:
        spans: their sources are the first rows of their lanes, as if these were current, and their stops the rows
            behind them. Written.
        current: int32 [lanes], which version each lane goes on from.
    """
    if decodes > len(spans.sources):
        raise BadInput("decodes", f"{decodes} of {len(spans.sources)} spans")
    if decodes:
        grid: Any = (decodes,)
        _place_kernel[grid](spans.sources, spans.first_stops, spans.stops, current, versions)


def keep_states(
    takes: torch.Tensor,
    runs: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    current: torch.Tensor,
    memory: torch.Tensor,
    versions: int,
) -> None:
    """Queue the copies of states behind positions that a step's tokens may come to, before `accept_states`. A place
    whose position they do not come to stays as it is.

    Args:
        takes: int64 [n, 3], number of a sequence, how many leading tokens count, and the memory's row of the copy.
        runs: int64 [S, columns]; the first column is a sequence's lane.
        starts, counts: int32 [S], leading tokens of each sequence before the step, and tokens of it that stand.
        current: as of `place_states`.
        memory: uint8 [rows, nbytes], a multiple of 8; written.
    """
    if memory.dim() != 2 or memory.dtype is not torch.uint8 or memory.shape[1] % 8 or not memory.is_contiguous():
        raise BadInput("memory", f"{memory.dtype} {tuple(memory.shape)} where rows of whole words were expected")
    words = memory.view(torch.int64)
    grid: Any = (len(takes), triton.cdiv(words.shape[1], _WORDS))
    if len(takes):
        _keep_kernel[grid](
            takes, runs, starts, counts, current, words, versions, runs.stride(0), words.shape[1], cells=_WORDS,
            num_warps=8,
        )  # fmt: skip


def accept_states(runs: torch.Tensor, counts: torch.Tensor, decodes: int, current: torch.Tensor, versions: int) -> None:
    """Queue that the lanes of the first `decodes` sequences go on behind their tokens that stand. Arguments as of
    `keep_states`; `current` is written."""
    if decodes:
        grid: Any = (decodes,)
        _accept_kernel[grid](runs, counts, current, versions, runs.stride(0))
