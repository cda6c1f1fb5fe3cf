"""Sums and means of rows against float64: `layer/sums.py`. Their bits are in `test_same_bits.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.layer.sums import row_mean, row_sum

from fdasync.errors import BadInput

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = torch.finfo(torch.float32).eps


def rows_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def assert_close(found: torch.Tensor, x: torch.Tensor, columns: int = 1) -> None:
    """`found` is the sum over the last dimension, over `columns`, within a float32 sum's reach and one rounding."""
    exact = x.double().sum(-1) / columns
    reach = 8 * EPS * x.double().abs().sum(-1) / columns + torch.finfo(found.dtype).eps / 2 * exact.abs()
    assert bool(((found.double() - exact).abs() <= reach + torch.finfo(found.dtype).tiny).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 40, 300, 9000])
def test_sums_and_means(device, dtype, columns):
    x = rows_of(3, columns).to(device, dtype)
    assert row_sum(x).dtype == dtype
    assert_close(row_sum(x), x)
    assert_close(row_mean(x), x, columns)
    assert torch.equal(row_sum(x, dtype=torch.float32).to(dtype), row_sum(x))


def test_shapes_and_strides(device):
    wide = rows_of(2, 5, 4, 20).to(device)
    assert row_sum(wide).shape == (2, 5, 4)
    assert row_mean(wide, keepdim=True).shape == (2, 5, 4, 1)
    for x in (wide[..., 3:17], wide.transpose(1, 2), wide[..., ::2], wide[:, :, 1]):
        assert torch.equal(row_mean(x), row_mean(x.contiguous()))
    assert row_sum(wide[:0]).shape == (0, 5, 4)
    assert_close(row_sum(wide[0, 0, 0]), wide[0, 0, 0])


def test_one_rows_nan_stays_its_own(device):
    x = rows_of(4, 70).to(device)
    before = row_sum(x)
    x[2, 3] = float("nan")
    after = row_sum(x)
    assert after.isnan().tolist() == [False, False, True, False]
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_bad_input_is_refused(device):
    x = torch.zeros((2, 8), device=device)
    for refused in (lambda: row_sum(x.double()), lambda: row_mean(x[:, :0]), lambda: row_sum(x, dtype=torch.int64)):
        with pytest.raises(BadInput):
            refused()
