"""Linear layers of a trainer's model, each of which gives torch rows.

torch makes other operations of a `linear`, with other roundings, by the layout of its input. A function mode sees all
of them, and with them each attribute of each tensor, which costs a part of a step. So plain `nn.Linear` modules get a
forward of their own, and the mode is entered only where the first pass finds that other code calls `linear` with more
than rows. Knows no batches. Called by `trainer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from fdasync_transformers.fixed.mode import linear_of_rows
from fdasync_transformers.replay.force import NotCopied

if TYPE_CHECKING:
    from collections.abc import Iterator


class LinearForward(NotCopied):
    """The forward of a plain `nn.Linear`."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module
        return linear_of_rows(input, module.weight, module.bias)


def plain_linears(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LinearForward]]:
    """The modules that are no more than a linear layer, and what their forward becomes."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            yield module, LinearForward(module)


class OtherLinears(TorchFunctionMode):
    """While entered, looks for calls of `linear` with more than rows.

    Attributes:
        seen: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        if func is linear and (args[0] if args else named["input"]).dim() != 2:
            self.seen = True
        return func(*args, **named)
