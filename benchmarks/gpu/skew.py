"""Skewed routing for `gpu_serving`: weights under which every router's logits have a fixed bias.

Routers of most families have no bias that reaches their weights, and a wrapper would not be the model's own path. So
weights are changed, as trained models do it by themselves: one coordinate of the residual stream is the same number for
all tokens (the embedding has it there, and nothing that writes to the stream changes it), nothing but routers reads it,
and the routers' columns for it hold the bias. Behind the norm that coordinate still depends on the layer, so one pass
of the library's own model finds what each router gets there, and the column is the bias over that. The bias of an
expert is drawn once, normal, `strength` times as wide as the spread of the logits over tokens: 0 is uniform routing.
Routing, kernels and captured graphs stay as they are; they read other numbers at the same places.

Holds for families whose routers are linear in the normed stream. Knows no figures. Used by `model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# the coordinate, and what the embedding has there over the length of its rows: norms hardly feel it
_AT, _HELD = 0, 0.5
# weights that write to the residual stream, by the ends of their names, and weights that read it
_WRITERS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
_READERS = (
    *(f"{name}_proj.weight" for name in ("q", "k", "v", "q_a", "gate", "up")),
    *("kv_a_proj_with_mqa.weight", "experts.gate_up_proj", "lm_head.weight"),
)
# spread over tokens of what a router gets there, over its mean: with more it is no bias
_MOST_SPREAD = 0.5


@dataclass
class Skew:
    """What is written to a model's weights, and what stood there.

    Attributes:
        columns: of each router, by module name.
        held: what the embedding has at the coordinate.
        spread: of the bias over tokens, over its mean, by layer.
        logits: spread of each layer's logits over tokens, without the bias.
    """

    columns: dict[str, torch.Tensor]
    held: float
    spread: tuple[float, ...]
    logits: tuple[float, ...]
    _before: dict[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, model: Any) -> None:
        """Write to the weights, in place. Nothing may be in flight."""
        for name, place, value in _places(model, self.columns, self.held):
            self._before[name] = place.clone()
            place.copy_(value)

    def undo(self, model: Any) -> None:
        """Write back what stood there; does nothing before `apply`."""
        for name, place, _ in _places(model, self.columns, self.held):
            if name in self._before:
                place.copy_(self._before.pop(name))


def find_skew(model: Any, routers: Sequence[str], strength: float, *, prompts: int = 16, tokens: int = 256) -> Skew:
    """Find the columns for a model as the library made it, whose weights are changed by it.

    Args:
        model: loaded, with attention of the library's own. Give it up afterwards.
        routers: module names, in the order of layers.
        strength: see the module.
        prompts, tokens: random tokens that the pass has; what routers get at their later half counts, as it does where
            contexts are long.

    Raises RuntimeError where what a router gets at the coordinate is not the same for all tokens.
    """
    columns = {name: torch.zeros(0) for name in routers}
    spreads: dict[str, float] = {}
    logits: dict[str, float] = {}
    random = torch.Generator().manual_seed(7)
    drawn = {name: torch.randn(model.get_submodule(name).weight.shape[0], generator=random) for name in routers}

    def before(name: str, router: Any, args: tuple[Any, ...]) -> None:
        width = router.weight.shape[1]
        hidden = args[0].reshape(prompts, tokens, width)[:, tokens // 2 :].reshape(-1, width).float()
        held = hidden[:, _AT]
        spreads[name] = float(held.std() / held.mean().abs())
        own = hidden @ router.weight.float().T
        logits[name] = float(own.std(0).mean())
        bias = drawn[name].to(held.device) * (strength * logits[name])
        columns[name] = (bias / held.mean()).to(router.weight.dtype).cpu()
        router.weight[:, _AT] = columns[name].to(held.device)

    held_by_all = _HELD * float(model.get_input_embeddings().weight.float().norm(dim=1).mean())
    for _, place, value in _places(model, {}, held_by_all):
        place.copy_(value)
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: before(name, module, args))
        for name in routers
    ]
    ids = torch.randint(0, model.config.vocab_size, (prompts, tokens), generator=random)
    try:
        with torch.inference_mode():
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    unseen = [name for name in routers if name not in spreads]
    wide = [f"{name}: {value:.2f}" for name, value in spreads.items() if value > _MOST_SPREAD]
    if unseen or wide:
        raise RuntimeError(f"routers have no fixed bias: not called {unseen[:3]}, spread over tokens {wide[:3]}")
    return Skew(columns, held_by_all, tuple(spreads[name] for name in routers), tuple(logits[name] for name in routers))


def _places(model: Any, columns: dict[str, torch.Tensor], held: float) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, view of the weights, and what is written there."""
    found = []
    parameters = dict(model.named_parameters())
    embedding = model.get_input_embeddings().weight
    for name, tensor in parameters.items():
        if tensor is embedding:
            found.append((name, tensor.data[:, _AT], torch.full((), held)))
        elif name.endswith(_WRITERS):
            place = tensor.data[:, _AT] if tensor.dim() == 3 else tensor.data[_AT]
            found.append((name, place, torch.zeros(())))
        elif name.endswith(_READERS):
            found.append((name, tensor.data[..., _AT], torch.zeros(())))
    for name, column in columns.items():
        weight = parameters[f"{name}.weight"].data
        found.append((f"{name}.weight", weight[:, _AT], column))
    return found
