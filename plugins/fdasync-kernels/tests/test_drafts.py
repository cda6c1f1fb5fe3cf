"""Rows of drafts, and how far samples agree with them: `drafts.py` against the rule of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fdasync_kernels.drafts import RUN_COLUMNS, accept_drafts, place_drafts
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kernels_here import both

from fdasync.errors import BadInput
from fdasync.runner.drafts import Path, follow

VOCAB, LANES, MAX_TOKENS = 50, 6, 24


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sent(values, dtype):
    return torch.tensor(values, dtype=dtype, device=here())


@st.composite
def steps(draw):
    """Sequences of a step: lane, length, rows, room, path and its start, most drafts; and samples for each row."""
    speculation = draw(st.integers(0, 5))
    sequences = []
    for lane in draw(st.permutations(range(LANES)))[: draw(st.integers(1, LANES))]:
        length = draw(st.integers(1, MAX_TOKENS - 1))
        width = draw(st.integers(0, speculation + 1))
        room = draw(st.integers(max(length - 1, 1), MAX_TOKENS))
        token = st.one_of(st.integers(0, 3), st.sampled_from([-1, VOCAB, 2**31 - 1, -(2**31)]))
        path = draw(st.lists(token, max_size=2 * speculation + 1))
        begin = draw(st.one_of(st.integers(max(1, length - 3), length + 3), st.just(1 << 40)))
        most = draw(st.integers(0, speculation))
        samples = draw(st.lists(st.integers(0, 3), min_size=width, max_size=width))
        sequences.append((lane, length, width, room, path, begin, most, samples))
    return speculation + 1, sequences


@pytest.mark.ci
@both
@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_rows_and_runs_are_what_the_host_would_make(kernels, step):
    most_rows, sequences = step
    rng = np.random.default_rng(1)
    known = rng.integers(0, VOCAB, (LANES, MAX_TOKENS + 3)).astype(np.int32)
    lengths = np.full(LANES, 7, np.int32)
    rows = sum(width for _, _, width, *_ in sequences)
    runs, paths, samples, row = [], [9], [], 0
    span = 4 * most_rows
    noise = rng.random((len(sequences), span))
    for lane, length, width, room, path, begin, most, drawn in sequences:
        lengths[lane] = length
        runs.append([lane, row, width, -1, room, len(paths), len(path), begin, most, length - 1])
        paths += path
        samples += drawn
        row += width
    # a prompt that ends here, on a lane that no other sequence has: its row is where the host says
    ended = [lane for lane in range(LANES) if lane not in {one[0] for one in sequences}][:1]
    numbers = runs + [[lane, rows, 1, 5, MAX_TOKENS, 0, 0, 0, 0, 0] for lane in ended]
    samples += [11] * len(ended)
    tokens = torch.from_numpy(known.copy()).to(here())[:, :MAX_TOKENS]
    on_device = torch.from_numpy(lengths.copy()).to(here())
    table = sent(numbers, torch.int64)
    row_lanes, row_starts = sent([-7] * (rows + 1), torch.int32), sent([-7] * (rows + 1), torch.int64)
    row_counts = sent([-7] * (rows + 1), torch.int32)
    floats = torch.full((rows + 1, 4), -7.0, dtype=torch.float64, device=here())
    starts, used = kernels.place_drafts(
        table[: len(runs)], sent(paths, torch.int32), on_device, tokens, VOCAB, most_rows, row_lanes, row_starts,
        row_counts, torch.from_numpy(noise).to(here()), floats,
    )  # fmt: skip
    assert starts.tolist() == [length for _, length, *_ in sequences]
    wanted_lanes, wanted_starts, wanted_noise, counts = [], [], [], []
    for number, (lane, length, width, room, path, begin, most, drawn) in enumerate(sequences):
        drafts = follow(Path(begin, most, np.array(path, np.int32)), length, VOCAB).tolist()
        forwarded = max(0, min(1 + len(drafts), width, room - length))
        wanted_lanes += [lane] * forwarded + [-1] * (width - forwarded)
        wanted_starts += [length + at for at in range(forwarded)] + [0] * (width - forwarded)
        wanted_noise += [noise[number, at + 2] for at in range(forwarded)] + [0.0] * (width - forwarded)
        assert used[number] == forwarded
        assert tokens[lane, length + 1 : length + forwarded].tolist() == drafts[: max(forwarded - 1, 0)]
        right = 0
        while right + 1 < forwarded and drawn[right] == drafts[right]:
            right += 1
        count = right + 1 if forwarded else 0
        counts.append(count)
        lengths[lane] = length + count
        # a rejected draft stays where it is, behind all that is known
        known[lane, length + 1 : length + forwarded] = drafts[: max(forwarded - 1, 0)]
        kept = drawn[:count][: MAX_TOKENS - length - 1]
        known[lane, length + 1 : length + 1 + len(kept)] = kept
    # nothing is written past the rows
    assert row_lanes.tolist() == [*wanted_lanes, -7]
    assert row_starts.tolist() == [*wanted_starts, -7]
    assert row_counts.tolist() == [int(lane >= 0) for lane in wanted_lanes] + [-7]
    assert floats[:, 1].tolist() == [*wanted_noise, -7.0]
    assert (floats[:, [0, 2, 3]] == -7.0).all()
    for lane in ended:
        lengths[lane] = 6
        known[lane, 6] = 11
    stands = kernels.accept_drafts(table, sent(samples, torch.int64), starts, used, on_device, tokens, most_rows)
    assert stands.tolist() == counts + [1] * len(ended)
    assert on_device.tolist() == lengths.tolist()
    assert np.array_equal(tokens.cpu().numpy(), known[:, :MAX_TOKENS])


@both
def test_a_sequence_on_no_lane_is_padding(kernels):
    lengths, tokens = sent([3, 3], torch.int32), sent([[1] * 8] * 2, torch.int32)
    for lane in (-1, 2):
        runs = sent([[lane, 0, 2, -1, 8, 0, 1, 4, 1, 0]], torch.int64)
        row_lanes, row_starts = sent([5, 5], torch.int32), sent([5, 5], torch.int64)
        paths = sent([2], torch.int32)
        starts, used = kernels.place_drafts(runs, paths, lengths, tokens, VOCAB, 2, row_lanes, row_starts)
        counts = kernels.accept_drafts(runs, sent([2, 2], torch.int64), starts, used, lengths, tokens, 2)
        assert (row_lanes.tolist(), row_starts.tolist(), counts.tolist()) == ([-1, -1], [0, 0], [0])
    assert lengths.tolist() == [3, 3]
    assert (tokens == 1).all()


def test_what_does_not_fit_is_refused():
    runs = sent([[0] * len(RUN_COLUMNS)], torch.int64)
    lengths, tokens = sent([3], torch.int32), sent([[1] * 8], torch.int32)
    rows = sent([0], torch.int32), sent([0], torch.int64)
    paths = sent([0], torch.int32)
    with pytest.raises(BadInput, match="runs"):
        place_drafts(runs[:, :5], paths, lengths, tokens, VOCAB, 1, *rows)
    with pytest.raises(BadInput, match="lengths"):
        place_drafts(runs, paths, lengths.long(), tokens, VOCAB, 1, *rows)
    with pytest.raises(BadInput, match="row_starts"):
        place_drafts(runs, paths, lengths, tokens, VOCAB, 1, rows[0], rows[0])
    noise = sent([[0.0]], torch.float64)
    for floats in (None, noise[0], noise.float(), noise[:0]):
        with pytest.raises(BadInput, match="floats"):
            place_drafts(runs, paths, lengths, tokens, VOCAB, 1, *rows, None, noise, floats)
    with pytest.raises(BadInput, match="samples"):
        accept_drafts(runs, paths, rows[0], rows[0], lengths, tokens, 1)
