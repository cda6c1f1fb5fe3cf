"""What models with indexers are not served with yet, and why.

Knows configs; knows no modules. Called by `open_model.py` and `examine.py`, before weights are loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync_transformers.start.runner_config import uses_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.start.runner_config import TransformersConfig


def refuse_undone(kind: str, config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> None:
    """Raise ConfigError, naming the field, for what is not done yet for a model whose indexers pick positions."""
    for field, why in _undone(config, limits, device):
        raise ConfigError(field, f"is not for models with indexers so far, such as {kind}: {why}")


def _undone(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> Iterator[tuple[str, str]]:
    if uses_kernels(config, device):
        yield "runner_config.device", "no kernel scores positions or reads chosen ones: steps run on CPUs"
    if limits.tensor_parallel > 1:
        yield "tensor_parallel", "ranks do not agree on the positions that each would pick"
    if limits.sum_slices > 1:
        yield "sum_slices", "the sums of scores have no slices"
    if limits.numerics == "fixed":
        yield "numerics", "scores have other bits in a chunk than alone, and another position may be picked"
    if config.mtp:
        yield "runner_config.mtp", "the indexers of multi-token prediction layers have no keys in the blocks"
