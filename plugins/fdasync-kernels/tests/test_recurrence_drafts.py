"""Which versions of states steps with drafts begin from and leave, and which snapshots they take, played step by step
against a host that knows how many rows stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fdasync_kernels.recurrence.drafts import accept_states, keep_states, place_states
from fdasync_kernels.recurrence.spans import FRESH, PlanSize, Spans, plan_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

LANES, MOST, PLACES = 4, 3, 3
VERSIONS = MOST + 1
FIRST_PLACE = LANES * VERSIONS
SIZE = PlanSize(LANES, LANES * (MOST + 1))
# more than a program copies
NBYTES = 8 * 4100


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sent(values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=here())


@st.composite
def steps(draw: st.DrawFn) -> list[list[tuple[int, int, int, int]]]:
    """Of each step its decodes: lane, rows, rows that stand, and behind which token a snapshot is asked for; -1: no."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        decodes = []
        for lane in draw(st.permutations(range(LANES)))[: draw(st.integers(1, LANES))]:
            width = draw(st.integers(1, MOST))
            decodes.append((lane, width, draw(st.integers(0, width)), draw(st.integers(-1, MOST + 1))))
        made.append(decodes)
    return made


@settings(max_examples=15, deadline=None)
@given(played=steps(), seed=st.integers(0, 99))
def test_a_state_goes_on_from_the_last_row_that_stands(
    played: list[list[tuple[int, int, int, int]]], seed: int
) -> None:
    device, rng = here(), np.random.default_rng(seed)
    memory = torch.from_numpy(rng.integers(0, 256, (FIRST_PLACE + PLACES, NBYTES), np.uint8)).to(device)
    current = torch.zeros(LANES, dtype=torch.int32, device=device)
    # what the host would know: the state of each lane, and how many tokens it has
    states = {lane: memory[lane * VERSIONS].cpu().clone() for lane in range(LANES)}
    lengths = dict.fromkeys(range(LANES), 5)
    kept = [memory[FIRST_PLACE + place].cpu().clone() for place in range(PLACES)]
    for decodes in played:
        lanes = np.array([lane for lane, *_ in decodes])
        widths = np.array([width for _, width, *_ in decodes])
        rows = lanes * VERSIONS
        stops = [(n, b, int(rows[n]) + b) for n, width in enumerate(widths.tolist()) for b in range(1, width)]
        # a prompt behind the decodes, whose places are certain
        free = [lane for lane in range(LANES) if lane not in lanes][:1]
        targets = [*(rows + widths).tolist(), *[lane * VERSIONS for lane in free]]
        sources, counts = [*rows.tolist(), *[FRESH] * len(free)], [*widths.tolist(), *[2] * len(free)]
        plan = torch.from_numpy(plan_spans(SIZE, *map(np.array, (sources, counts, targets)), stops)).to(device)
        spans = Spans.of(plan, SIZE, None, len(sources))
        place_states(spans, len(decodes), current, VERSIONS)
        assert spans.sources[len(decodes) :].tolist() == [FRESH] * len(free)
        for number, (lane, width, _, _) in enumerate(decodes):
            assert torch.equal(memory[int(spans.sources[number])].cpu().clone(), states[lane])
            first, last = spans.first_stops[number : number + 2].tolist()
            ways = spans.stops[first:last, 1].tolist()
            assert len({*ways, int(spans.sources[number])}) == width + 1
            for row in ways:
                assert row // VERSIONS == lane
                memory[row] = torch.from_numpy(rng.integers(0, 256, NBYTES, np.uint8)).to(device)
        takes = [
            (number, lengths[lane] + behind, FIRST_PLACE + number % PLACES)
            for number, (lane, _, _, behind) in enumerate(decodes)
            if behind >= 0
        ][:PLACES]
        told = sent([[lane, 7] for lane, *_ in decodes], torch.int64)
        starts = sent([lengths[lane] for lane, *_ in decodes], torch.int32)
        stood = sent([count for _, _, count, _ in decodes], torch.int32)
        if takes:
            keep_states(sent(takes, torch.int64), told, starts, stood, current, memory, VERSIONS)
        accept_states(told, stood, len(decodes), current, VERSIONS)
        for number, (lane, _, count, _) in enumerate(decodes):
            first = int(spans.first_stops[number])
            ways = spans.stops[first:, 1].tolist()
            for taker, position, row in takes:
                behind = position - lengths[lane]
                if taker == number and 0 < behind <= count:
                    kept[row - FIRST_PLACE] = memory[ways[behind - 1]].cpu().clone()
            # where no row had room it goes on from where the step began
            goes_on = ways[count - 1] if count else int(spans.sources[number])
            states[lane] = memory[goes_on].cpu().clone()
            lengths[lane] += count
        for place, held in enumerate(kept):
            assert torch.equal(memory[FIRST_PLACE + place].cpu().clone(), held)


def test_what_does_not_fit_is_refused() -> None:
    current, counts = sent([0], torch.int32), sent([1], torch.int32)
    plan = torch.from_numpy(plan_spans(SIZE, *[np.array([0])] * 1, np.array([1]), np.array([1]))).to(here())
    with pytest.raises(BadInput, match="2 of 1 spans"):
        place_states(Spans.of(plan, SIZE, None, 1), 2, current, VERSIONS)
    takes = sent([[0, 1, 1]], torch.int64)
    for memory in (torch.zeros(2, 12, dtype=torch.uint8), torch.zeros(2, 8), torch.zeros(8, dtype=torch.uint8)):
        with pytest.raises(BadInput, match="memory"):
            keep_states(takes, takes, counts, counts, current, memory.to(here()), VERSIONS)
