"""A row's bits depend on neither its place in a product nor the number of rows."""

from __future__ import annotations

import pytest
import torch
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.fixed.products import product, products

from fdasync.errors import RunnerError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (37, 64), (3, 64), (64, 63), (1000, 48), (1, 5), (96, 1408))


def scattered(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randperm(count, generator=random)[:length] for length in (1, 2, 7, 16, 17, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_rows_have_the_same_bits_at_every_place(dtype, columns, width):
    torch.manual_seed(columns)
    rows, weights = torch.randn(50, width).to(dtype), torch.randn(columns, width).to(dtype)
    bias = torch.randn(columns).to(dtype)
    whole, with_bias = product(rows, weights.t()), product(rows, weights.t(), bias)
    assert torch.allclose(whole.double(), rows.double() @ weights.double().t(), rtol=1e-2, atol=0.3)
    assert torch.allclose(with_bias.double(), whole.double() + bias.double(), rtol=2e-2, atol=0.3)
    for some in scattered(50):
        assert torch.equal(product(rows[some], weights.t()), whole[some])
        assert torch.equal(product(rows[some], weights.t(), bias), with_bias[some])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(product(rows, weights.t()), whole)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_torch_itself_does_not_keep_them():
    """Else nothing here would be needed."""
    torch.manual_seed(0)
    rows, weights = torch.randn(50, 192), torch.randn(256, 192)
    assert not torch.equal(torch.cat([row[None] @ weights.t() for row in rows]), rows @ weights.t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_the_same_bits_beside_others_and_alone(dtype):
    # as heads of a model, which are fewer on a rank; where it fails, few of these numbers differ
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=random).to(dtype) for shape in ((4, 6400, 8), (4, 8, 32)))
    whole = products(left, right)
    for count in (1, 2):
        assert torch.equal(products(left[:count], right[:count]), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [20, 3, 1])
def test_batches_of_products(dtype, columns):
    torch.manual_seed(0)
    left, right = torch.randn(3, 50, 24).to(dtype), torch.randn(3, 24, columns).to(dtype)
    whole = products(left, right)
    assert torch.allclose(whole.double(), left.double() @ right.double(), rtol=1e-2, atol=0.1)
    for some in scattered(50):
        assert torch.equal(products(left[:, some], right), whole[:, some])
    for one in range(3):
        assert torch.equal(product(left[one], right[one]), whole[one])
        # nor do layouts matter, nor how many columns stand beside one
        assert torch.equal(product(left[one].t().contiguous().t(), right[one].t().contiguous().t()), whole[one])
    assert torch.equal(products(left, right[:, :, :1]), whole[:, :, :1])
    assert torch.equal(products(left.mT.contiguous().mT, right.mT.contiguous().mT), whole)
    outer = products(left[:, :, :1], right[:, :1])
    assert torch.equal(outer, left[:, :, :1] * right[:, :1])


@pytest.mark.parametrize("inference", [False, True])
def test_the_mode_takes_every_way_to_ask_for_a_product(inference):
    torch.manual_seed(0)
    x, weights, bias = torch.randn(5, 7, 24), torch.randn(40, 24), torch.randn(40)
    flat = x.view(-1, 24)
    wanted, with_bias = product(flat, weights.t()), product(flat, weights.t(), bias)
    into = torch.empty(35, 40)
    weighted = torch.randn(35, 40)
    with torch.inference_mode(inference), FixedNumerics():
        plain = [
            torch.nn.functional.linear(x, weights),
            x @ weights.t(),
            torch.matmul(flat, weights.t()),
            torch.einsum("btk,nk->btn", x, weights),
            torch.tensordot(x, weights.t(), 1),
            torch.mm(flat, weights.t(), out=into),
            torch.cat([torch.mm(row[None], weights.t(), out=torch.empty(1, 40)) for row in flat]),
            torch.cat([torch.bmm(row[None, None], weights.t()[None], out=torch.empty(1, 1, 40)) for row in flat]),
            torch.stack([weights @ row for row in flat]),
            torch.stack([torch.nn.functional.linear(row, weights) for row in flat]),
            torch.baddbmm(torch.zeros(5, 1, 40), x, weights.t().expand(5, 24, 40)),
        ]
        scaled = [
            torch.addmm(weighted, flat, weights.t(), beta=2, alpha=3),
            torch.baddbmm(weighted[None], flat[None], weights.t()[None], beta=2, alpha=3)[0],
        ]
        biased = [torch.nn.functional.linear(x, weights, bias), torch.addmm(bias, flat, weights.t())]
    for one in plain:
        assert torch.equal(one.reshape(35, 40), wanted)
    for one in scaled:
        assert torch.equal(one, weighted * 2 + wanted * 3)
    for one in biased:
        assert torch.equal(one.reshape(35, 40), with_bias)


def test_gradients_are_torchs():
    torch.manual_seed(0)
    x, weights = torch.randn(9, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    with FixedNumerics():
        out = torch.nn.functional.silu(torch.nn.functional.linear(x, weights))
    out.square().sum().backward()
    theirs = [one.detach().double().requires_grad_() for one in (x, weights)]
    torch.nn.functional.silu(torch.nn.functional.linear(*theirs)).square().sum().backward()
    assert torch.allclose(x.grad.double(), theirs[0].grad, rtol=1e-4, atol=1e-3)
    assert torch.allclose(weights.grad.double(), theirs[1].grad, rtol=1e-4, atol=1e-3)


def test_what_has_no_fixed_form_is_refused():
    x = torch.randn(1, 2, 5, 8)
    rows, experts = torch.randn(4, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    with FixedNumerics(), pytest.raises(RunnerError, match="depend on the batch"):
        torch._grouped_mm(rows, experts, offs=torch.tensor([2, 4], dtype=torch.int32))
    with FixedNumerics(), pytest.raises(RunnerError, match="depend on the batch"):
        torch.nn.functional.conv1d(x[0], torch.randn(3, 5, 2).transpose(0, 1)[:3, :2])
    with FixedNumerics(), pytest.raises(RunnerError, match="depend on the batch"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "width"), [(48, 1408), (256, 7), (64, 1024)])
def test_layouts_of_both_sides_change_nothing(dtype, columns, width):
    """Torch's own loops, which have float16 where a processor has no products in it, choose by them."""
    torch.manual_seed(0)
    rows, right = torch.randn(16, width).to(dtype), torch.randn(columns, width).to(dtype).t()
    turned, walked = rows.t().contiguous().t(), right.contiguous()
    wanted = product(rows, right)
    for one in (rows, turned):
        for other in (right, walked):
            assert torch.equal(product(one, other), wanted)
            assert torch.equal(products(one[None], other[None])[0], wanted)
