"""Values by the rollout's kernels, gradients by the library's code, which the backward pass runs again.

The forward pass runs the kernels alone, past all modes, and keeps their inputs; the library's graph is built in the
backward pass, of the inputs and parameters of the forward pass. Knows no kernels and no modules of the library. Called
by `device_forms.py` and `device_experts.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fdasync_transformers.fused.modules import twin_of
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Again = Callable[[list[torch.Tensor], tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]


class _Given(NamedTuple):
    """In a tuple, so that autograd does not take the values for inputs: some models change results in place."""

    values: tuple[torch.Tensor, ...]
    again: Again
    kept: int


def recomputed(
    values: tuple[torch.Tensor, ...],
    again: Again,
    inputs: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """`values` with the gradients of `again`'s results; themselves where no gradient is asked for.

    Args:
        values: new tensors of floats, without a graph, that nothing else holds: they become the results.
        again: called in the backward pass, with gradients on: gets the inputs as leaves, and `kept`; returns a tensor
            for each value, of its shape, whose numbers are not read.
        inputs: of the values, parameters among them. They are saved for the backward pass.
        kept: other tensors that are saved.
    """
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in inputs):
        return values
    # torch has no types here
    found: tuple[torch.Tensor, ...] = _Recomputed.apply(_Given(values, again, len(kept)), *kept, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Recomputed(torch.autograd.Function):
    """See `recomputed`."""

    @staticmethod
    def forward(ctx: Any, given: _Given, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*saved)
        ctx.given = given._replace(values=())
        ctx.set_materialize_grads(False)
        return given.values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        _, again, kept = ctx.given
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1 + kept :]
        leaves = [one.detach().requires_grad_(need) for one, need in zip(saved[kept:], needed, strict=True)]
        with torch.enable_grad():
            outs = again(leaves, saved[:kept])
        asked = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
        found: Iterator[torch.Tensor | None] = iter(())
        if asked:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(
                torch.autograd.grad([out for out, _ in asked], wanted, [grad for _, grad in asked], allow_unused=True)
            )
        return None, *([None] * kept), *(next(found, None) if need else None for need in needed)


def with_parameters(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of a module, and of its parts, with the class's own forward and other parameters, given by their paths;
    all else is shared."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for path, parameter in parameters.items():
        name, _, rest = path.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = parameter
        else:
            own[name] = parameter
    changed = {name: with_parameters(module.get_submodule(name), part) for name, part in parts.items()}
    twin = twin_of(module, own, changed)
    vars(twin).pop("forward", None)
    return twin
