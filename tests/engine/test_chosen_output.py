"""The engine's side of chosen positions: rows that do not stand are found before a result could have too few."""

from __future__ import annotations

import re
from functools import partial

import pytest

from fdasync.engine.chosen_output import ChosenOutput
from fdasync.errors import InvariantBroken
from fdasync.runner.chosen import ChosenRows, ChosenShape

SHAPE = ChosenShape(layer_ids=(0, 2), top_k=3)
PROMPT_TOKENS, MOST = 8, 16


def written(start: int, count: int) -> ChosenRows:
    rows = ChosenRows.create(SHAPE, start, MOST)
    rows.close_fd()
    rows.stand(start, count)
    return rows


@pytest.mark.parametrize(
    ("shared", "own", "num_tokens", "problem"),
    [
        (7, 3, 3, ""),
        (7, 0, 0, ""),
        (3, 0, 0, ""),
        (6, 3, 3, "chosen positions came up to position 6, and 7 were to be shared"),
        (0, 3, 3, "chosen positions came up to position 0, and 7 were to be shared"),
        (7, 2, 3, "chosen positions came up to position 9, and 10 were computed"),
    ],
)
def test_a_sample_has_its_own_rows_and_those_that_it_shares(shared, own, num_tokens, problem):
    first, rows = written(0, shared), written(PROMPT_TOKENS - 1, own)
    check = partial(ChosenOutput(rows, first, PROMPT_TOKENS, ()).check, num_tokens)
    if not problem:
        check()
        return
    with pytest.raises(InvariantBroken, match=re.escape(problem)):
        check()
