"""The models of `gpu_serving --model`: published shapes, with as many layers as fit beside their KV.

A layer is left out only where weights and the KV of 256 contexts would take more than 120 GB; every width is as
published. Knows no torch. Used by the commands of `benchmarks/gpu` and by the benchmark of sleep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.lib.published_shapes import MORE, SHAPES, Shape, tiny

DEFAULT_MODEL = "qwen3-30b-a3b"
HYBRID_MODEL = "qwen3-next-80b-a3b"


@dataclass(frozen=True)
class Served:
    """A model of the benchmark.

    Attributes:
        shape: as published.
        layers: that are kept.
    """

    shape: Shape
    layers: int

    def config(self, *, small: bool = False) -> dict[str, Any]:
        """Of the layers that are kept; `small`: every width too, and the fewest layers that have all kinds."""
        return tiny(self.shape.cut(self.shape.least_layers)) if small else self.shape.cut(self.layers)


#: by the name that `--model` takes
MODELS = {
    DEFAULT_MODEL: Served(SHAPES["Qwen3-30B-A3B"], 48),
    # of 46: weights of 92 GB and KV of 27; a layer of experts takes 4.7 and 1.3
    "glm-4.5-air": Served(SHAPES["GLM-4.5-Air"], 20),
    "deepseek-v2-lite": Served(MORE["DeepSeek-V2-Lite"], 27),
    # of 48: weights of 53 GB, and 7 GB of states for 256 sequences; fits 80 GB
    HYBRID_MODEL: Served(MORE["Qwen3-Next-80B-A3B"], 16),
}
