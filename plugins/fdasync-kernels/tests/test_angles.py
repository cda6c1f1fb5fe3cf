"""Rows of a table by position, padding and positions past its end among them."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.layer.angles import angles_at

from fdasync.errors import BadInput


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 20, 128])
def test_rows_are_those_of_the_positions(device: torch.device, dtype: torch.dtype, width: int) -> None:
    table = torch.randn(50, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    positions = torch.tensor([0, 49, 7, 7, -1, 50, 1 << 40], device=device)
    found = angles_at(table, positions)
    assert torch.equal(found[:5], table[positions[:5].clamp(min=0)])
    assert found[5:].isnan().all()
    assert angles_at(table, positions[:0]).shape == (0, width)


def test_what_it_does_not_take(device: torch.device) -> None:
    table, positions = torch.zeros(4, 6, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    for bad in (table.T, table[0], table[:0], table.long()):
        with pytest.raises(BadInput, match="table"):
            angles_at(bad, positions)
    for wrong in (positions.int(), positions[None], torch.zeros(6, dtype=torch.int64, device=device)[::2]):
        with pytest.raises(BadInput, match="positions"):
            angles_at(table, wrong)
