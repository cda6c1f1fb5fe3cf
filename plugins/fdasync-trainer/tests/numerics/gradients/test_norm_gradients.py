"""A norm's gradient is taken by torch's own norm where that has the same, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_trainer.numerics.gradients import norms
from fdasync_trainer.numerics.gradients.norms import norm_gradient
from torch import nn

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = {form: getattr(norms, form) for form in ("_plain", "_wide", "_one_plus")}


class Norm(nn.Module):
    """As the library writes them."""

    def __init__(self, rounding: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = 1e-6
        self.rounding = rounding
        if rounding != "none":
            self.weight = nn.Parameter(torch.zeros(64, dtype=dtype))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounding == "normed":
            return self.weight * normed.to(rows.dtype)
        if self.rounding == "product":
            return (self.weight.float() * normed).to(rows.dtype)
        if self.rounding == "one_plus":
            return (normed * (1 + self.weight.float())).to(rows.dtype)
        return normed.to(rows.dtype)


class Twice(Norm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


class Centred(Norm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows - rows.mean(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounding", ["normed", "product", "one_plus", "none"])
@pytest.mark.parametrize("inference", [False, True])
def test_forms_of_the_library(rounding: str, dtype: torch.dtype, inference: bool) -> None:
    module = Norm(rounding, dtype).to(PLACE)
    with torch.inference_mode(inference), torch.no_grad():
        form = norm_gradient(module, dtype, PLACE)
    assert form is FORMS["_one_plus" if rounding == "one_plus" else "_plain"]
    assert all(one.grad is None for one in module.parameters())
    # of rows with more dimensions, beside float64
    torch.manual_seed(0)
    rows, given = torch.randn(3, 5, 64).to(PLACE, dtype).requires_grad_(), torch.randn(3, 5, 64).to(PLACE, dtype)
    parameters = [one.detach().normal_().requires_grad_() for one in module.parameters()]
    found = torch.autograd.grad(form(rows, *(parameters or [None]), 1e-6), [rows, *parameters], given)
    exact = Norm(rounding, torch.float64).to(PLACE)
    exact.forward = lambda x: wide(exact, x)  # type: ignore[method-assign]
    for one, other in zip(exact.parameters(), parameters, strict=True):
        one.data.copy_(other.detach())
    doubles = rows.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(doubles), [doubles, *exact.parameters()], given.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= {4: 1e-5}.get(dtype.itemsize, 1e-2) * other.norm()


def wide(module: Any, rows: torch.Tensor) -> torch.Tensor:
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + module.eps)
    return normed if module.rounding == "none" else normed * (module.weight + (module.rounding == "one_plus"))


def test_a_weight_of_another_dtype() -> None:
    assert norm_gradient(Norm("product", torch.float32).to(PLACE), torch.bfloat16, PLACE) is FORMS["_wide"]


@pytest.mark.parametrize("kind", [Twice, Centred])
def test_what_computes_something_else_keeps_the_librarys_code(kind: type[Norm]) -> None:
    for rounding in ("normed", "one_plus", "none"):
        assert norm_gradient(kind(rounding, torch.bfloat16).to(PLACE), torch.bfloat16, PLACE) is None


def test_a_norm_that_says_no_epsilon_or_has_more_parameters_keeps_the_librarys_code() -> None:
    silent, biased = (Norm("normed", torch.float32).to(PLACE) for _ in range(2))
    del silent.eps
    biased.bias = nn.Parameter(torch.zeros(64, device=PLACE))
    for module in (silent, biased):
        assert norm_gradient(module, torch.float32, PLACE) is None
