"""Rows, noise and places of drafts that a model's own layers make, and the steps that verify them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_kernels.drafts import RUN_COLUMNS
from fdasync_kernels.own_drafts import draft_noise, draft_room, draft_rows, take_drafts
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kernels_here import both

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync_kernels.step_kernels import StepKernels

LANES, MAX_TOKENS, MOST = 6, 20, 3


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sent(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=here())


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Lane (-1: padding), length and room."""
    found = []
    for lane in draw(st.permutations(range(LANES)))[: draw(st.integers(1, LANES))]:
        length = draw(st.integers(1, MAX_TOKENS - 1))
        found.append((draw(st.sampled_from([lane, lane, lane, -1])), length, draw(st.integers(length, MAX_TOKENS))))
    return found


@both
@settings(max_examples=30, deadline=None)
@given(drawn=sequences(), each=st.integers(1, MOST))
def test_drafts_from_their_rows_to_the_step_that_verifies_them(
    kernels: StepKernels, drawn: list[tuple[int, int, int]], each: int
) -> None:
    rng = np.random.default_rng(each)
    lanes = sent([lane for lane, _, _ in drawn], torch.int32)
    rooms = sent([room for _, _, room in drawn], torch.int64)
    known = rng.integers(0, 50, (LANES, MAX_TOKENS)).astype(np.int32)
    lengths = np.full(LANES, 7, np.int32)
    for lane, length, _ in drawn:
        if lane >= 0:
            lengths[lane] = length
    # of a lane that does not draft now, what was drafted before stays
    counts = np.full(LANES, 9, np.int32)
    on_device, drafted = torch.from_numpy(lengths).to(here()), torch.from_numpy(counts.copy()).to(here())
    kernels.draft_room(lanes, rooms, on_device, drafted, MOST, MAX_TOKENS)
    for lane, length, room in drawn:
        if lane >= 0:
            counts[lane] = max(0, min(MOST, room - length, MAX_TOKENS - 1 - length))
    assert drafted.tolist() == counts.tolist()

    tokens = torch.from_numpy(known.copy()).to(here())
    noise = rng.random((len(drawn), 12))
    first = [length - 2 for _, length, _ in drawn]
    for depth in range(MOST):
        rows = min(each, depth + 1)
        found, starts = kernels.draft_rows(lanes, on_device, drafted, depth, rows)
        wanted = [
            (lane, length + depth - rows + 1 + number) if lane >= 0 and depth < counts[lane] else (-1, 0)
            for lane, length, _ in drawn
            for number in range(rows)
        ]
        assert list(zip(found.tolist(), starts.tolist(), strict=True)) == wanted
        floats = torch.full((len(drawn) + 1, 4), -7.0, dtype=torch.float64, device=here())
        places = sent(first, torch.int64)
        kernels.draft_noise(lanes, torch.from_numpy(noise).to(here()), places, on_device, depth, floats)
        # of the position behind the row: 3 behind `first` at depth 0
        drawn_noise = [noise[number, 3 + depth] if lane >= 0 else 0.0 for number, (lane, _, _) in enumerate(drawn)]
        assert floats[:-1, 1].tolist() == drawn_noise
        assert (floats[:, [0, 2, 3]] == -7.0).all()
        assert floats[-1, 1] == -7.0
        samples = 100 + 10 * depth + np.arange(len(drawn))
        kernels.take_drafts(lanes, on_device, drafted, depth, torch.from_numpy(samples).to(here()), tokens)
        for number, (lane, length, _) in enumerate(drawn):
            if lane >= 0 and depth < counts[lane]:
                known[lane, length + 1 + depth] = samples[number]
    assert np.array_equal(tokens.cpu().numpy(), known)

    # a step that verifies at most two of them, of sequences with room for as many rows
    live = [(lane, length, room) for lane, length, room in drawn if lane >= 0]
    if not live:
        return
    runs = [[lane, 3 * at, 3, -1, room, 0, -1, 0, 2, 0] for at, (lane, _, room) in enumerate(live)]
    assert len(runs[0]) == len(RUN_COLUMNS)
    # some have fewer drafts than they have room for
    drafted[::2] = drafted[::2].clamp(max=1)
    counts[::2] = counts[::2].clip(max=1)
    row_lanes, row_starts = (sent([-7] * 3 * len(live), dtype) for dtype in (torch.int32, torch.int64))
    begun, used = kernels.place_drafts(
        sent(runs, torch.int64), sent([4], torch.int32), on_device, tokens, 200, MOST + 1, row_lanes, row_starts,
        drafted=drafted,
    )  # fmt: skip
    assert begun.tolist() == [length for _, length, _ in live]
    assert used.tolist() == [min(1 + min(counts[lane], 2), room - length) for lane, length, room in live]
    assert np.array_equal(tokens.cpu().numpy(), known)


def test_what_does_not_fit_is_refused() -> None:
    lanes, lengths = sent([0, 1], torch.int32), sent([3, 4], torch.int32)
    drafted, tokens = sent([0, 0], torch.int32), sent([[0] * 8] * 2, torch.int32)
    floats = torch.zeros(2, 4, dtype=torch.float64, device=here())
    first = sent([0, 0], torch.int64)
    for field, call in (
        ("rooms", lambda: draft_room(lanes, lengths, lengths, drafted, 1, 8)),
        ("lanes", lambda: draft_rows(lanes.long(), lengths, drafted, 0, 1)),
        ("each", lambda: draft_rows(lanes, lengths, drafted, 0, 2)),
        ("noise", lambda: draft_noise(lanes, floats.float(), first, lengths, 0, floats)),
        ("floats", lambda: draft_noise(lanes, floats, first, lengths, 0, floats[:1])),
        ("samples", lambda: take_drafts(lanes, lengths, drafted, 0, first[:1], tokens)),
        ("tokens", lambda: take_drafts(lanes, lengths, drafted, 0, first, tokens.long())),
    ):
        with pytest.raises(BadInput) as caught:
            call()
        assert caught.value.field == field
