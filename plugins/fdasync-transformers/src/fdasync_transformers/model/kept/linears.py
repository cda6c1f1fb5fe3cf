"""Linear layers whose weights are kept as stored, FP8 with a scale for each block.

A kept layer is the library's module with another class: its parameters are values and scales, its forward takes the
kernels once they were proven (`fused/layers/linears.py`), and until then the library's product of the dequantised
weight. Knows modules; knows no names of checkpoints. Called by `start/stored.py`, and by what merges or calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.model.kept.forms import FP8
from fdasync_transformers.model.kept.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# of layers that a step reads the weights of by itself (latents), or whose outputs choose: published ones are plain
_NEVER = frozenset({"kv_b_proj", "gate", "router", "shared_expert_gate"})


class KeptLinear(torch.nn.Linear):
    """See the module.

    Attributes:
        proven: the kernels compute what the library does.
    """

    proven = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return kept_product(input, kept_weight(self), self.bias, proven=self.proven)


def kept_weight(module: KeptLinear) -> Kept:
    """Its weight."""
    # an attribute, which goes before the parameter of that name
    found: Any = module.weight
    assert isinstance(found, Kept)
    return found


def make_plain(module: torch.nn.Module) -> torch.nn.Module:
    """Dequantise the kept linear layers of a copy of a module, in place, and return it: they are the library's then."""
    for part in module.modules():
        if isinstance(part, KeptLinear):
            plain = kept_weight(part)[:]
            del vars(part)["weight"], part._parameters["weight" + FP8.scales_end]
            part.weight = torch.nn.Parameter(plain, requires_grad=False)
            again: Any = part
            again.__class__ = torch.nn.Linear
    return module


def kept_product(rows: torch.Tensor, weight: Kept, bias: torch.Tensor | None, *, proven: bool) -> torch.Tensor:
    """rows [..., K] by a kept weight [N, K]. No gradient reaches the weight."""
    if not proven:
        return torch.nn.functional.linear(rows, weight[:], bias)
    from fdasync_kernels.linear.stored import stored_linear

    return stored_linear(rows, weight.values.detach(), weight.scales.detach(), bias)


def linears_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The linear layers of a model's decoder layers that could be kept, with their paths."""
    for path, module in model.named_modules():
        inside = ".layers." in path and not path.startswith("mtp.") and path.rpartition(".")[2] not in _NEVER
        if inside and type(module) is torch.nn.Linear:
            plain = module.weight.dtype is torch.bfloat16 and not FP8.problem(module.weight.shape, halves=1)
            if plain:
                yield path, module


def keep_linears(model: torch.nn.Module, paths: Collection[str]) -> None:
    """Keep the weights of these layers, which are on the meta device."""
    for path in paths:
        module: Any = model.get_submodule(path)
        weight = module._parameters["weight"]
        values, scales = FP8.empty(weight.shape, weight.device)
        module._parameters["weight"] = torch.nn.Parameter(values, requires_grad=False)
        module._parameters["weight" + FP8.scales_end] = torch.nn.Parameter(scales, requires_grad=False)
        vars(module)["weight"] = Kept(FP8, module._parameters, "weight")
        module.__class__ = KeptLinear
