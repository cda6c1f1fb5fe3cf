"""Hidden states of the position before, and those that stay of a step: `states.py` against plain loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_kernels.states import keep_states, shift_states
from hypothesis import example, given, settings
from hypothesis import strategies as st
from step_kernels_here import both

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync_kernels.step_kernels import StepKernels

LANES, SIZE, BLOCKS, WIDTH, DEPTHS = 5, 4, 6, 5, 2
MAX_TOKENS = SIZE * BLOCKS


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sent(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=here())


@st.composite
def steps(draw: st.DrawFn) -> Any:
    """Runs of decodes (lane, first position, rows, how many stand), each row an entry of its own with padding behind,
    and chunks (lane, first position, rows), as one entry or as one for each row."""
    lanes = draw(st.permutations(range(LANES)))
    several = draw(st.integers(0, 3))
    runs, chunks = [], []
    for lane in lanes[:several]:
        rows, start = draw(st.integers(1, 4)), draw(st.integers(1, MAX_TOKENS - 4))
        runs.append((lane, start, rows, draw(st.integers(1, rows)), draw(st.integers(0, 2))))
    for lane in lanes[several : several + draw(st.integers(0, 2))]:
        start = draw(st.integers(0, MAX_TOKENS - 1))
        chunks.append((lane, start, draw(st.integers(1, min(9, MAX_TOKENS - start)))))
    return runs, chunks, draw(st.booleans())


def entries(runs: Any, chunks: Any, flat: bool) -> tuple[list[list[int]], list[tuple[int, int] | None], list[bool]]:
    """Lanes, starts and rows of entries; of each row its lane and position; and whether it stands."""
    made, rows, stands = [], [], []
    for lane, start, count, stood, padding in runs:
        for number in range(count):
            made.append([lane, start + number, 1])
            rows.append((lane, start + number))
            stands.append(number < stood)
        made += [[-1, 0, 1]] * padding
        rows += [None] * padding
        stands += [False] * padding
    for lane, start, count in chunks:
        made += [[lane, start + number, 1] for number in range(count)] if flat else [[lane, start, count]]
        rows += [(lane, start + number) for number in range(count)]
        stands += [True] * count
    return made, rows, stands


@pytest.mark.heavy("no other test of the first ring runs this kernel")
@both
@settings(max_examples=30, deadline=None)
@given(step=steps())
# a layer has nothing of the first position
@example(step=([], [(2, 0, 1), (0, 0, 3)], False))
def test_rows_get_the_state_before_and_the_last_ones_that_stand_stay(kernels: StepKernels, step: Any) -> None:
    runs, chunks, flat = step
    made, rows, stands = entries(runs, chunks, flat)
    if not rows:
        return
    num_runs = sum(count + padding for _, _, count, _, padding in runs)
    rng = np.random.default_rng(0)
    states = rng.random((len(rows), WIDTH)).astype(np.float32)
    kept = rng.random((LANES, DEPTHS, WIDTH)).astype(np.float32)
    lanes = sent([lane for lane, _, _ in made], torch.int32)
    starts = sent([start for _, start, _ in made], torch.int64)
    firsts = sent(np.cumsum([0, *[count for _, _, count in made]]).tolist(), torch.int32)
    on_device = torch.from_numpy(kept.copy()).to(here())
    out = kernels.shift_states(torch.from_numpy(states).to(here()), on_device[:, 1], lanes, starts, firsts, MAX_TOKENS)
    wanted = np.zeros_like(states)
    for number, row in enumerate(rows):
        if row is None:
            continue
        lane, position = row
        if number and rows[number - 1] == (lane, position - 1):
            wanted[number] = states[number - 1]
        elif position:
            wanted[number] = kept[lane, 1]
    assert np.array_equal(out.cpu().numpy(), wanted)

    # the last of two shares is here, and the cells of a block are more than the states
    depth, shares, cells = 1, 2, 2
    tables = rng.permutation(LANES * BLOCKS).astype(np.int32).reshape(LANES, BLOCKS)
    lengths = np.zeros(LANES, np.int32)
    for lane, start, _, stood, _ in runs:
        lengths[lane] = start + stood
    blank = np.full((LANES * BLOCKS, SIZE, 1, 1, cells), -1.0, np.float32)
    carried = torch.from_numpy(blank.copy()).to(here())
    kernels.keep_states(
        torch.from_numpy(states).to(here()), depth, torch.from_numpy(lengths).to(here()), num_runs, lanes, starts,
        firsts, torch.from_numpy(tables).to(here()), on_device, carried, shares=shares, first_share=1,
        block_tokens=SIZE,
    )  # fmt: skip
    whole = np.full((LANES * BLOCKS, SIZE * shares * cells), -1.0, np.float32)
    for number, row in enumerate(rows):
        if row is None or not stands[number]:
            continue
        lane, position = row
        state = states[number] if position >= depth else np.zeros(WIDTH, np.float32)
        # later rows of the same block write over it, as later positions do
        whole[tables[lane, position // SIZE], depth * WIDTH :] = 0
        whole[tables[lane, position // SIZE], depth * WIDTH : (depth + 1) * WIDTH] = state
        kept[lane, depth] = state
    assert np.array_equal(on_device.cpu().numpy(), kept)
    mine = whole.reshape(-1, SIZE, shares, cells)[:, :, 1:]
    assert np.array_equal(carried.cpu().numpy()[:, :, :, 0], mine)


def test_what_does_not_fit_is_refused() -> None:
    states = torch.zeros(2, WIDTH, device=here())
    lanes, starts = sent([0, 1], torch.int32), sent([1, 2], torch.int64)
    firsts, kept = sent([0, 1, 2], torch.int32), torch.zeros(LANES, DEPTHS, WIDTH, device=here())
    tables, lengths = torch.zeros(LANES, BLOCKS, dtype=torch.int32), torch.zeros(LANES, dtype=torch.int32)
    carried = torch.zeros(9, SIZE, 1, 1, 3, device=here())
    for field, arguments in (
        ("states", (states[:, ::2], kept[:, 0], lanes, starts, firsts)),
        ("kept", (states, kept[:, 0, :3], lanes, starts, firsts)),
        ("starts", (states, kept[:, 0], lanes, starts.int(), firsts)),
        ("first_rows", (states, kept[:, 0], lanes, starts, firsts[:2])),
    ):
        with pytest.raises(BadInput) as caught:
            shift_states(*arguments, MAX_TOKENS)
        assert caught.value.field == field
    layout: dict[str, Any] = {"shares": 1, "first_share": 0, "block_tokens": SIZE}
    rest = (2, lanes, starts, firsts, tables.to(here()))
    for field, depth, held, others in (
        ("kept", DEPTHS, carried, layout),
        ("carried", 0, carried[..., :1], layout),
        ("carried", 0, carried, {**layout, "first_share": 1}),
        ("carried", 0, carried, {**layout, "block_tokens": 8}),
    ):
        with pytest.raises(BadInput) as caught:
            keep_states(states, depth, lengths.to(here()), *rest, kept, held, **others)
        assert caught.value.field == field
