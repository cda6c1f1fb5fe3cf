"""What ranks tell each other at the end of a step: any other bit, name, shape or dtype is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.in_step import share_step
from ranks import as_ranks, returned

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange

ROWS = {"ids": np.arange(12, dtype=np.uint8).reshape(3, 4), "norms": np.ones((3, 1), np.float32)}
HIDDEN = torch.arange(12.0).view(3, 4).to(torch.bfloat16)
EXPERTS = "chose other experts than rank 0: their rows differ"
STATES = "computed other hidden states than rank 0"


def shared(others: Any, ranks: int = 3, of: tuple[int, ...] = (2,)) -> list[Any]:
    """What each rank got or raised; the ranks `of` have `others` in the place of (rows, hidden)."""

    def work(exchange: Exchange) -> list[int]:
        rows, hidden = others if exchange.rank in of else (ROWS, HIDDEN)
        tokens = np.array([7, -1] if not exchange.rank else [], np.int32)
        return share_step(HostCollectives(exchange), 5, rows, hidden, tokens).tolist()

    return as_ranks(ranks, work)


def test_tokens_are_those_of_rank_0() -> None:
    # strides are not looked at
    same = {name: np.asfortranarray(values) for name, values in reversed(ROWS.items())}
    assert returned(shared((same, HIDDEN.t().contiguous().t()))) == [[7, -1]] * 3
    assert returned(shared(({}, None), of=(0, 1, 2))) == [[7, -1]] * 3


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """With another last bit in its last element."""
    bits = tensor.clone()
    bits.view(torch.int16)[-1, -1] ^= 1
    return bits


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("others", "words"),
    [
        (({**ROWS, "ids": ROWS["ids"] + 1}, HIDDEN), EXPERTS),
        (({**ROWS, "ids": ROWS["ids"].reshape(4, 3)}, HIDDEN), EXPERTS),
        (({**ROWS, "ids": ROWS["ids"].view(np.int8)}, HIDDEN), EXPERTS),
        (({"ids": ROWS["ids"], "other": ROWS["norms"]}, HIDDEN), EXPERTS),
        (({}, HIDDEN), EXPERTS),
        ((ROWS, flipped(HIDDEN)), STATES),
        ((ROWS, None), STATES),
        # experts follow from hidden states: those are what is told
        (({**ROWS, "ids": ROWS["ids"] + 1}, flipped(HIDDEN)), EXPERTS),
    ],
)
def test_a_rank_that_computed_something_else_is_named_on_all(others: Any, words: str) -> None:
    for error in shared(others):
        assert isinstance(error, RunnerError)
        assert (error.problem, error.step_id) == (f"rank 2 of 3 {words}", 5)


def test_several_ranks_that_differ_are_named() -> None:
    assert {error.problem for error in shared((ROWS, None), of=(1, 2))} == {f"rank 1, 2 of 3 {STATES}"}
