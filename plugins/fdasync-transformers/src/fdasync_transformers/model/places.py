"""Where a model's tensors lie in one memory, so that what is merged later lies behind each other from the start.

Knows modules and parameters; knows no devices and no names of families. Called by `execution/model_memory.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# what addresses of tensors are multiples of: as torch's own are, and where others of their name lie before them, which
# is enough for every load. Scales of few rows take so little
_ALIGN_NBYTES, _BEHIND_NBYTES = 512, 16


def plan_places(model: torch.nn.Module) -> tuple[list[int], int]:
    """Where each of a model's tensors goes in one memory, in the order in which the model's conversion asks for them
    (tied ones once for each name), and the bytes of all.

    Parameters of one name of modules side by side (weights, biases, scales) lie behind each other: projections can then
    be merged where they are (`fused/layers/merged.py`), without a copy elsewhere.
    """
    kinds: dict[int, tuple[str, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            kinds.setdefault(id(parameter), (path.rpartition(".")[0], name))
    asked: list[torch.Tensor] = []

    def measured(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return tensor

    library: Any = model
    library._apply(measured)
    together: dict[tuple[str, str], list[int]] = {}
    for number, tensor in enumerate(asked):
        # buffers by themselves
        together.setdefault(kinds.get(id(tensor), ("", f"{number}")), []).append(number)
    places, used = [0] * len(asked), 0
    for numbers in together.values():
        used = _up(used, _ALIGN_NBYTES)
        for number in numbers:
            places[number] = _up(used, _BEHIND_NBYTES)
            used = places[number] + asked[number].nbytes
    return places, used


def taker(memory: torch.Tensor, places: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a model's tensors their places of `plan_places` in `memory`, uint8, when its conversion asks."""
    left = iter(places)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        place = next(left, None)
        if place is None:
            raise InvariantBroken("a model has more tensors than it had before")
        return memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return make


def _up(nbytes: int, unit: int) -> int:
    return math.ceil(nbytes / unit) * unit
