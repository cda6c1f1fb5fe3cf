"""What models with recurrent layers are not served with yet, and why.

Knows configs and mixers. Called by `open_model.py` and `examine.py`, before weights are loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ConfigError
from fdasync_transformers.fused.recurrent.flat import find_missing
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.start.runner_config import uses_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.start.runner_config import TransformersConfig


def refuse_undone(
    model: torch.nn.Module, kind: str, config: TransformersConfig, limits: RunnerLimits, device: torch.device
) -> None:
    """Raise ConfigError, naming the field, for a feature that a model with recurrent layers cannot have yet."""
    for field, why in _undone(model, config, limits, device):
        raise ConfigError(field, f"is not for models with recurrent layers so far, such as {kind}: {why}")


def refuse_cut(model: torch.nn.Module, kind: str, cuts: Mapping[str, object]) -> None:
    """Raise ConfigError where ranks would hold parts of a recurrent layer: each computes those whole.

    `cuts`: by name of the model's tensor.
    """
    for mixer in find_mixers(model):
        cut = next((name for name in cuts if name.startswith(f"{mixer.name}.")), "")
        if cut:
            raise ConfigError("tensor_parallel", f"cuts {cut} of {kind}, and recurrent layers are whole on every rank")


def _undone(
    model: torch.nn.Module, config: TransformersConfig, limits: RunnerLimits, device: torch.device
) -> Iterator[tuple[str, str]]:
    if uses_kernels(config, device) and (missing := find_missing(model)):
        yield "runner_config.device", f"no kernel knows {missing}; steps on CPUs do"
    if limits.sum_slices > 1:
        yield "sum_slices", "sums in their recurrence have no slices"
    if limits.numerics == "fixed":
        yield "numerics", "a token has other bits in a chunk than alone"
