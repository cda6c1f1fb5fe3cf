"""Values with the gradients of what the backward pass computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_trainer.numerics.gradients.recomputed import recomputed, with_parameters
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.fused.modules import past_modes
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def products(leaves: list[torch.Tensor], kept: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The product of two, and the square of one, times what was kept."""
    one, other = leaves
    return [one * other * kept[0], one * one * kept[0]]


def test_values_get_the_gradients_of_what_is_run_again() -> None:
    one, other = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    kept = (torch.tensor([2.0]),)
    values = (torch.tensor([7.0]), torch.tensor([8.0]))
    first, second = recomputed(values, products, (one, other), kept)
    assert (first.item(), second.item()) == (7, 8)
    assert [grad.item() for grad in torch.autograd.grad(first + second, (one, other), retain_graph=True)] == [22, 6]
    # of one value alone, and again
    assert torch.autograd.grad(second, (one, other), allow_unused=True, retain_graph=True) == (12, None)
    assert torch.autograd.grad(first, (one,))[0].item() == 10


def test_what_needs_no_gradient_gets_none() -> None:
    one, other = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0])
    values, kept = (torch.tensor([7.0]), torch.tensor([8.0])), (torch.tensor([2.0]),)
    asked = []

    def again(leaves: list[torch.Tensor], kept: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        asked.extend(leaf.requires_grad for leaf in leaves)
        return products(leaves, kept)

    recomputed(values, again, (one, other), kept)[0].backward()
    assert asked == [True, False]
    assert one.grad is not None
    assert one.grad.item() == 10
    assert recomputed(values, again, (other, other), kept) is values
    with torch.no_grad():
        assert recomputed(values, again, (one, other), kept) is values


def test_a_value_may_be_changed_in_place() -> None:
    # as OLMoE clips its projections
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (out,) = recomputed((torch.tensor([7.0, -7.0]),), lambda leaves, _kept: [leaves[0] * leaves[0]], (x,))
    out.clamp_(min=0.0)
    assert out.tolist() == [7.0, 0.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [6.0, 0.0]


def test_an_input_that_changed_meanwhile_is_refused() -> None:
    x = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)
    (out,) = recomputed((torch.ones(2),), lambda leaves, _kept: [leaves[0] * leaves[1]], (x, weight))
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_checkpointing_frees_the_inputs_and_computes_them_again() -> None:
    runs = []

    def part(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        inner = x * 3
        return recomputed(((inner * inner).detach(),), lambda leaves, _kept: [leaves[0] * leaves[0]], (inner,))[0]

    x = torch.tensor([2.0], requires_grad=True)
    out = checkpoint(part, x, use_reentrant=False)
    assert len(runs) == 1
    out.backward()
    assert (len(runs), x.grad) == (2, 36)


def test_no_mode_sees_what_lies_past_them() -> None:
    class Names(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.randn(3, 4)
    with FixedNumerics(), Names():
        with past_modes():
            # refused within the mode
            torch.nn.functional.conv1d(x[None], x[:, :3, None])
        assert not seen
        x.neg()
    assert seen


def test_a_copy_has_the_parameters_that_are_given() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))
    module[0].forward = lambda _x: pytest.fail("an instance's own forward is called")  # type: ignore[method-assign]
    given = {name: torch.randn_like(one) for name, one in module.named_parameters()}
    before = {name: one.clone() for name, one in module.named_parameters()}
    twin, x = with_parameters(module, given), torch.randn(4, 2)
    wanted = (x @ given["0.weight"].t()) @ given["1.weight"].t() + given["1.bias"]
    assert torch.allclose(twin(x), wanted)
    assert all(torch.equal(one, before[name]) for name, one in module.named_parameters())
    assert "forward" in vars(module[0])
