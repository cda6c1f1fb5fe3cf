"""What `gpu_experts` counts with: shapes of experts, drawn routing, the floor, and how many calls a graph holds.

Knows no torch and no kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._gpu_models import MODELS
from benchmarks._published_shapes import SHAPES, Shape, tiny

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: of bfloat16 products on an H200, the best that was measured there
PRODUCTS_PER_S = 790e12
# the same weights are read again no sooner than after so many other bytes
_APART_NBYTES = 1e9


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        shape: of the model.
        num_experts, top_k, hidden, inner: of the layer.
        wide_weights: its router gives float32 weights whatever the model's dtype is.
    """

    shape: Shape
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    wide_weights: bool = False

    @property
    def expert_nbytes(self) -> int:
        """Of one expert in bfloat16: gate, up and down."""
        return 2 * 3 * self.hidden * self.inner

    def floor_s(self, tokens: int, chosen: float, copy_bytes_per_s: float) -> float:
        """The longer of two: reading `chosen` experts at the rate of a copy, all products at the device's best."""
        products = tokens * self.top_k * 2 * 3 * self.hidden * self.inner
        return max(chosen * self.expert_nbytes / copy_bytes_per_s, products / PRODUCTS_PER_S)

    def calls(self, chosen: float, layers: int) -> int:
        """Calls of one round over the layers, a multiple of them: the round reads enough that no cache holds it."""
        return layers * max(1, math.ceil(_APART_NBYTES / (layers * chosen * self.expert_nbytes)))

    def config(self, *, small: bool) -> dict[str, Any]:
        """Of a model that has such a layer, as few layers as it can have."""
        config = self.shape.cut(self.shape.least_layers)
        return tiny(config) if small else config


def _experts(shape: Shape, *, wide_weights: bool) -> Experts:
    config = shape.config
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return Experts(
        shape=shape,
        num_experts=next(int(config[name]) for name in names if name in config),
        top_k=int(config["num_experts_per_tok"]),
        hidden=int(config["hidden_size"]),
        inner=int(config.get("moe_intermediate_size", config["intermediate_size"])),
        wide_weights=wide_weights,
    )


#: by the name that `--shapes` takes
EXPERTS = {
    "qwen3-30b-a3b": _experts(MODELS["qwen3-30b-a3b"].shape, wide_weights=False),
    "glm-4.5-air": _experts(MODELS["glm-4.5-air"].shape, wide_weights=True),
    "deepseek-v2-lite": _experts(MODELS["deepseek-v2-lite"].shape, wide_weights=True),
    "mixtral-8x7b": _experts(SHAPES["Mixtral-8x7B"], wide_weights=False),
}


def small(experts: Experts) -> Experts:
    """The same with the widths of a rehearsal."""
    config = experts.config(small=True)
    return _experts(Shape(config, dense=experts.shape.dense), wide_weights=experts.wide_weights)


def draw_routing(
    random: np.random.Generator, tokens: int, num_experts: int, top_k: int, bias: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids [tokens, top_k], the likeliest first, and weights that add up to 1. Logits are normal, plus the bias [E]."""
    logits = random.standard_normal((tokens, num_experts), np.float32)
    if bias is not None:
        logits += bias
    ids = np.ascontiguousarray(np.argsort(-logits, axis=1)[:, :top_k])
    chosen = np.exp(np.take_along_axis(logits, ids, 1))
    return ids, chosen / chosen.sum(1, keepdims=True)
