"""Products in slices have the bits of each slice's own product, joined as a tree: `linear/slices.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.linear.product import linear
from fdasync_kernels.linear.slices import linear_slices

from fdasync.errors import BadInput


def drawn(device: torch.device, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    # rows of x stand apart, as those of a wider tensor do, and both begin within their memory
    x = torch.randn((rows + 1, inputs + 8), generator=generator).to(device, dtype)[1:, :inputs]
    return [x, torch.randn((outputs + 1, inputs), generator=generator).to(device, dtype)[1:]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 24, 64), (5, 40, 96), (33, 17, 128)])
@pytest.mark.parametrize("slices", [2, 4])
def test_a_sum_is_the_tree_of_its_slices(
    device: torch.device, rows: int, outputs: int, inputs: int, slices: int, dtype: torch.dtype
) -> None:
    x, weight = drawn(device, rows, outputs, inputs, dtype)
    each = [
        linear(part, own.contiguous()).float()
        for part, own in zip(x.chunk(slices, 1), weight.chunk(slices, 1), strict=True)
    ]
    wanted = each[0] + each[1] if slices == 2 else (each[0] + each[1]) + (each[2] + each[3])
    found = linear_slices(x, weight, slices)
    assert found.dtype is torch.float32
    assert torch.equal(found, wanted)
    if slices == 4 and dtype is torch.float32 and rows > 5:
        assert not torch.equal(found, ((each[0] + each[1]) + each[2]) + each[3])


def test_no_rows_are_no_launch(device: torch.device) -> None:
    x, weight = drawn(device, 1, 8, 32, torch.float32)
    assert linear_slices(x[:0], weight, 2).shape == (0, 8)


def test_what_the_kernels_do_not_take_is_refused_by_name(device: torch.device) -> None:
    x, weight = drawn(device, 3, 8, 24, torch.float32)
    with pytest.raises(BadInput, match="5 of 24 inputs"):
        linear_slices(x, weight, 5)
    with pytest.raises(BadInput, match="4 of 22 inputs"):
        linear_slices(x[:, :22], weight[:, :22], 4)
    with pytest.raises(BadInput, match="beside rows"):
        linear_slices(x[:, :12], weight, 2)
    with pytest.raises(BadInput, match="rows are contiguous"):
        linear_slices(x, weight.t().contiguous().t(), 2)
    with pytest.raises(BadInput, match="a"):
        linear_slices(x.double(), weight.double(), 2)
