"""The largest logit of rows against torch, with ties, bad rows and strided ones."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.sampling.largest import largest_of_rows

from fdasync.errors import BadInput


def _first_largest(row: torch.Tensor) -> int:
    return int((row.float() == row.float().max()).nonzero()[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 31, 4096, 4099, 9001])
def test_ids_are_those_of_the_largest(device: torch.device, dtype: torch.dtype, width: int) -> None:
    make = torch.Generator().manual_seed(width)
    whole = torch.full((5, width + 7), float("nan"), dtype=dtype)
    whole[:, :width] = torch.randn(5, width, generator=make).to(dtype)
    tokens, finite = largest_of_rows(whole.to(device)[:, :width])
    assert tokens.tolist() == [_first_largest(row) for row in whole[:, :width]]
    assert finite.all()


@pytest.mark.parametrize("value", [0.0, -3.0, 2.0])
def test_the_lowest_id_wins_a_tie(device: torch.device, value: float) -> None:
    logits = torch.full((3, 9000), value - 1)
    for row, places in enumerate(([8999, 4095, 4096], [4096, 8000], [0, 1])):
        logits[row, places] = value
    logits[2, 0] *= -1 if value == 0.0 else 1  # -0.0 is 0.0
    tokens, finite = largest_of_rows(logits.to(device))
    assert tokens.tolist() == [4095, 4096, 0]
    assert finite.all()


def test_bad_rows_are_told_and_their_ids_are_in_range(device: torch.device) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, 4500] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    logits[4, :4999] = float("-inf")
    tokens, finite = largest_of_rows(logits.to(device))
    assert finite.tolist() == [False, False, False, False, True, True]
    assert ((tokens >= 0) & (tokens < 5000)).all()
    assert int(tokens[4]) == 4999


def test_no_rows_and_bad_shapes(device: torch.device) -> None:
    tokens, finite = largest_of_rows(torch.empty(0, 5, device=device))
    assert tokens.shape == finite.shape == (0,)
    for logits in (torch.zeros(3), torch.zeros(2, 0), torch.zeros(4, 3).T):
        with pytest.raises(BadInput, match="logits"):
            largest_of_rows(logits.to(device))
