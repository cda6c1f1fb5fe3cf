"""Where another order of sums is found, and what is used there: `gpu/kernels/linear/agreement.py`.

The two ways to a product are written here, in orders that are known.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fdasync.gpu.kernels.linear.agreement import Agreements, FixedLinear, Shape
from fdasync.gpu.kernels.linear.product import linear

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def summed(x: torch.Tensor, weight: torch.Tensor, inputs: range) -> torch.Tensor:
    """float32 sums over `inputs`, one after the other."""
    total = torch.zeros(len(x), len(weight))
    for at in inputs:
        total = total + x[:, at : at + 1].float() * weight[:, at].float()
    return total


def ended(total: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (total if bias is None else total + bias.float()).to(dtype)


def in_order(x, weight, bias):
    return ended(summed(x, weight, range(weight.shape[1])), bias, x.dtype)


def split(x, weight, bias):
    half = weight.shape[1] // 2
    halves = summed(x, weight, range(half)), summed(x, weight, range(half, weight.shape[1]))
    return ended(halves[0] + halves[1], bias, x.dtype)


def late_rounding(x, weight, bias):
    """As `in_order`, but the bias is added to what was rounded."""
    found = in_order(x, weight, None)
    return found if bias is None else found + bias


class Counting:
    """Calls of a product, by their numbers of rows."""

    def __init__(self, product):
        self._product = product
        self.rows = []

    def __call__(self, x, weight, bias):
        self.rows.append(len(x))
        return self._product(x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_split_is_found_in_a_single_row_of_few_outputs(dtype, biased):
    for seed in range(10):
        other = Agreements(split, in_order, CPU, seed=seed)
        assert other.counts(Shape(4, 64, dtype, biased), [1, 3]) == set()
        same = Agreements(in_order, in_order, CPU, seed=seed)
        assert same.counts(Shape(4, 64, dtype, biased), [1, 3]) == {1, 3}


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_another_rounding_of_the_bias_is_found(dtype):
    found = Agreements(late_rounding, in_order, CPU)
    assert found.counts(Shape(64, 32, dtype, True), [2]) == set()
    assert found.counts(Shape(64, 32, dtype, False), [2]) == {2}


def test_only_the_counts_that_agree_and_each_is_tried_once():
    library = Counting(lambda x, weight, bias: (in_order if len(x) in (1, 4) else split)(x, weight, bias))
    found = Agreements(library, in_order, CPU, rounds=1)
    shape = Shape(8, 33, torch.bfloat16, False)
    assert found.counts(shape, [4, 1, 2]) == {1, 4}
    assert {1, 2, 4} == set(library.rows)
    library.rows.clear()
    assert found.counts(shape, [1, 2]) == {1}
    assert not library.rows
    assert found.counts(shape, [4, 5]) == {4}
    assert set(library.rows) == {5}


def test_a_result_that_overflows_proves_nothing():
    def over(x, weight, bias):
        return torch.full((len(x), len(weight)), float("inf"), dtype=x.dtype)

    assert Agreements(over, over, CPU).counts(Shape(8, 16, torch.float16, False), [2]) == set()


def test_signs_of_zeros_count():
    def zeros(x, weight, bias):
        return torch.zeros(len(x), len(weight), dtype=x.dtype)

    found = Agreements(lambda *each: -zeros(*each), zeros, CPU)
    assert found.counts(Shape(8, 16, torch.bfloat16, False), [2]) == set()


def placed(shape: tuple[int, ...], bytes_off: int = 0) -> torch.Tensor:
    """Random values so many bytes off a multiple of 256."""
    count = torch.Size(shape).numel()
    held = torch.randn(count + 128)
    begin = (bytes_off - held.data_ptr()) % 256 // 4
    return held[begin : begin + count].view(shape)


def test_the_library_is_used_where_it_agrees_and_tensors_lie_as_they_did():
    library, ours = Counting(in_order), Counting(lambda x, *rest: in_order(x.reshape(-1, 64), *rest))
    fixed = FixedLinear(frozenset({2, 6}), library, ours)
    weight, bias, x = placed((8, 64)), placed((8,)), placed((2, 3, 64))
    assert torch.equal(fixed(x, weight, bias), in_order(x.view(6, 64), weight, bias).view(2, 3, 8))
    assert (library.rows, ours.rows) == ([6], [])
    for others in (
        (placed((3, 64)), weight, bias),  # not tried
        (placed((2, 65))[:, :64], weight, bias),
        (placed((2, 64), 64), weight, bias),
        (placed((2, 64)), placed((64, 8)).T, bias),
        (placed((2, 64)), weight, placed((8,), 4)),
    ):
        fixed(*others)
    assert library.rows == [6]
    assert ours.rows == [3, 2, 2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device_it_has_our_bits(device, dtype):
    found = Agreements(functional.linear, linear, device)
    counts = {1, 16, 64, 256}
    equal = found.counts(Shape(2048, 4096, dtype, True), counts)
    assert equal <= counts
    fixed = FixedLinear(equal, functional.linear, linear)
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(256, 4096, generator=generator, device=device).to(dtype)
    weight = torch.randn(2048, 4096, generator=generator, device=device).to(dtype)
    whole = linear(x, weight, weight[:, 0].contiguous())
    for count in counts:
        assert torch.equal(fixed(x[:count], weight, weight[:, 0].contiguous()), whole[:count]), count
