"""Counts of the experts that were chosen, in memory of two sides."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fdasync.cache.aux import AuxSpec
from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.picks import EVERY_ROWS, MOST_AT_FIRST, MOST_ROWS, WHOLE_ROWS, PickShape, PickTable

SHAPE = PickShape(3, 2, 16)
SPECS = (AuxSpec("routing", (3, 2), "uint8"),)


def table(shape: PickShape = SHAPE) -> PickTable:
    return PickTable(shape, memoryview(bytearray(shape.nbytes)))


def counted(rows: np.ndarray, num_experts: int = 16) -> np.ndarray:
    """The counts, one pick after the other."""
    counts = np.zeros((rows.shape[1], num_experts), int)
    for row in rows:
        for layer, ids in enumerate(row):
            for expert in ids:
                counts[layer, expert] += 1
    return counts


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_the_first_rows_are_counted_whole(dtype: str) -> None:
    picks, rng = table(), np.random.default_rng(1)
    sizes = (1, 7, 0, *[MOST_AT_FIRST] * 15)
    steps = [rng.integers(0, 16, (count, 3, 2)).astype(dtype) for count in sizes]
    for rows in steps:
        picks.add(rows)
    assert (picks.table == counted(np.concatenate(steps))).all()
    assert picks.rows == picks.counted == sum(sizes) < WHOLE_ROWS


def test_of_a_long_step_some_rows_stand_for_all_and_others_the_next_time() -> None:
    # each row has an expert of its own
    picks = table(PickShape(1, 1, 4 * MOST_AT_FIRST))
    rows = np.arange(4 * MOST_AT_FIRST, dtype=np.uint16).reshape(-1, 1, 1)
    picks.add(rows)
    assert picks.table.sum() == picks.rows == 4 * MOST_AT_FIRST
    assert picks.counted == np.count_nonzero(picks.table) == MOST_AT_FIRST
    for _ in range(3):
        picks.add(rows)
    assert (picks.table == 4).all(), "some rows were never looked at"


def test_later_few_rows_stand_for_all_that_were_written_since() -> None:
    picks = table(PickShape(1, 1, 64))
    for _ in range(WHOLE_ROWS // 64):
        picks.add(np.arange(64, dtype=np.uint8).reshape(-1, 1, 1))
    assert (picks.table == WHOLE_ROWS // 64).all()
    # decode steps of 48 rows, each sample with an expert that nobody had chosen more often than others
    rows = np.arange(48, dtype=np.uint8).reshape(-1, 1, 1)
    steps = 40 * EVERY_ROWS // 48
    for _ in range(steps):
        picks.add(rows)
    assert picks.rows == WHOLE_ROWS + 48 * steps
    assert picks.counted <= WHOLE_ROWS + 40 * MOST_ROWS
    added = picks.table[0] - WHOLE_ROWS // 64
    assert (added[48:] == 0).all()
    # of all that was written since, all but the last few rows are stood for
    assert 48 * steps - EVERY_ROWS - MOST_ROWS < added.sum() <= 48 * steps
    # every sample is seen as often as the others
    assert added[:48].min() > 0.8 * added[:48].mean()
    assert added[:48].max() < 1.2 * added[:48].mean()


def test_ids_that_only_fill_a_row_up_are_no_picks() -> None:
    picks = table(PickShape(3, 2, 16, (2, 0, 1)))
    rows = np.zeros((5, 3, 2), np.uint8)
    rows[:, 0] = (3, 4)
    rows[:, 2, 0] = 9
    picks.add(rows)
    assert picks.table.sum() == 5 * 3
    assert picks.table[0, 3] == picks.table[0, 4] == picks.table[2, 9] == 5


def test_ids_beyond_the_experts_break_no_step() -> None:
    picks = table()
    picks.add(np.full((2, 3, 2), 255, np.uint8))
    assert picks.rows == 2


def test_one_side_of_an_arena_counts_what_the_other_reads() -> None:
    arena = AuxArena.create(4, 8, SPECS, SHAPE)
    peer = AuxArena.attach(arena.plan, iter([os.dup(arena.region.fd)]))
    rows = np.random.default_rng(2).integers(0, 16, (9, 3, 2)).astype(np.uint8)
    peer.scatter(np.arange(9), np.full(9, 1), {"routing": rows})
    assert arena.picks is not None
    assert (arena.picks.table == counted(rows)).all()
    # the rows beside it are whole
    into = {"routing": np.zeros((9, 3, 2), np.uint8)}
    arena.copy_rows([0, 1], [1, 1], 0, 9, into, 0)
    assert (into["routing"] == rows).all()
    peer.close()
    arena.close()
