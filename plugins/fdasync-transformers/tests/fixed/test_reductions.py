"""Sums and softmax have one order: whatever the layout, the rows beside one, the dim and the threads."""

from __future__ import annotations

import pytest
import torch
from fdasync_transformers.fixed.mode import FixedNumerics
from torch.nn import functional

from fdasync.errors import RunnerError

# of a tensor and a dim
FUNCTIONS = {
    "sum": torch.sum,
    "float32 sum": lambda x, dim: x.sum(dim, dtype=torch.float32),
    "mean": torch.mean,
    "mean out": lambda x, dim: torch.mean(x, dim, out=torch.empty(0, dtype=x.dtype)),
    "prod": lambda x, dim: (x.float() * 0.1 + 1).prod(dim),
    "nansum": torch.nansum,
    "var": torch.var,
    "std": torch.std,
    "std_mean": lambda x, dim: torch.stack(torch.std_mean(x, dim), -1),
    "norm": lambda x, dim: x.norm(dim=dim),
    "norm 1": lambda x, dim: torch.linalg.vector_norm(x, 1, dim=dim),
    "normalize": lambda x, dim: functional.normalize(x, dim=dim),
    "logsumexp": torch.logsumexp,
    "softmax": torch.softmax,
    "float32 softmax": lambda x, dim: torch.softmax(x, dim, dtype=torch.float32),
    "log_softmax": torch.log_softmax,
    "cumsum": torch.cumsum,
    "glu": functional.glu,
}


def layouts(x):
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
    wide[..., 0] = x
    yield x
    yield wide[..., 0]
    for order in ((2, 0, 1), (1, 0, 2), (2, 1, 0), (0, 2, 1)):
        back = [order.index(dim) for dim in range(3)]
        yield x.permute(order).contiguous().permute(back)


@pytest.mark.ci(after=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_layouts_and_batches_change_nothing(name, dtype):
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    for shape in ((30, 6, 64), (30, 300, 2), (7, 38, 130)):
        x = (torch.randn(shape) * 2).to(dtype)
        with FixedNumerics():
            for dim in (1, 2):
                whole = function(x, dim)
                plain = function(x.double(), dim).double()
                assert torch.allclose(whole.double(), plain, rtol=2e-2, atol=5e-2)
                for y in layouts(x):
                    assert torch.equal(function(y, dim), whole)
                    for some in (slice(0, 1), slice(3, 4), slice(2, 7)):
                        assert torch.equal(function(y[some], dim), whole[some])
                        assert torch.equal(function(y[some].clone(), dim), whole[some])


@pytest.mark.parametrize("name", ["sum", "mean", "norm", "softmax", "glu"])
def test_threads_change_nothing(name):
    """Nor does the order of dims, where tokens stand behind what is reduced."""
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    x = torch.randn(40, 1, 35_000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with FixedNumerics():
            wanted = function(x, 2)
        for count in (1, 2):
            torch.set_num_threads(count)
            with FixedNumerics():
                assert torch.equal(function(x, 2), wanted)
                assert torch.equal(function(x[:1], 2), wanted[:1])
                assert torch.equal(
                    function(x.transpose(1, 2), 1), wanted.transpose(1, 2) if wanted.dim() == 3 else wanted
                )
                turned = function(x.permute(2, 0, 1)[:, 3:4], 0)
                assert torch.equal(turned if turned.dim() == 2 else turned.permute(1, 2, 0), wanted[3:4])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_all_at_once(threads):
    torch.manual_seed(0)
    x = torch.randn(3, 50_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with FixedNumerics():
            rows, means = x.sum(-1), x.mean(-1)
            for row, wanted, mean in zip(x, rows, means, strict=True):
                assert torch.equal(row.sum(), wanted)
                assert torch.equal(row.mean(), mean)
                assert torch.equal(row[:0].sum(), torch.zeros(()))
            assert torch.equal(x.sum((0, 1)), x.sum())
            assert x.sum((0, 1), keepdim=True).shape == (1, 1)
            assert x.sum(0, keepdim=True).shape == (1, 50_000)
            assert x.var((0, 1)).shape == ()
            assert x.norm().shape == ()
            assert torch.equal(torch.ones(5, 3, dtype=torch.int64).sum(0), torch.full((3,), 5))
    finally:
        torch.set_num_threads(before)


def test_gradients_are_torchs():
    x = torch.randn(4, 6, 8, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    with FixedNumerics():
        torch.softmax(x.transpose(1, 2), 1).square().sum(1).mean().backward()
    torch.softmax(wide.transpose(1, 2), 1).square().sum(1).mean().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-3, atol=1e-6)


def test_what_has_no_fixed_form_is_refused():
    x = torch.randn(4, 6, 8)
    for refused in (
        lambda: torch.addbmm(torch.zeros(6, 6), x, x.mT),
        lambda: torch.cdist(x, x),
        lambda: functional.group_norm(x, 2),
        lambda: functional.avg_pool1d(x, 2),
        lambda: torch.fft.rfft(x),
        lambda: functional.bilinear(x[0], x[1], torch.randn(3, 8, 8)),
    ):
        with FixedNumerics(), pytest.raises(RunnerError, match="depend on the batch"):
            refused()
