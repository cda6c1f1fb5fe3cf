"""Logits of a rollout with fixed numerics by kernels, all of it fused as at a runner's start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.start.fuse import fuse, set_plain_experts
from fdasync_transformers.start.runner_config import TransformersConfig
from rollout_bits import played

from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    import torch


def device_rollout_logits(model: Any, sequences: list[torch.Tensor], cut: int = 33) -> tuple[torch.Tensor, str]:
    """As `rollout_logits`, and what was fused, for people."""
    # in the interpreter nothing is fused unless it is asked for
    here: dict[str, Any] = {} if model.device.type == "cuda" else {"experts": "fused", "fused_layers": True}
    config = TransformersConfig(kernels="triton", **here)
    limits = RunnerLimits(max_running=len(sequences), max_step_tokens=1024, numerics="fixed")
    model.eval()
    experts = find_moe_layers(model)
    set_plain_experts(model, config, experts, limits)
    mends = families.mend(model)
    live = LiveRows()
    fused = fuse(model, config, experts, live, limits)
    layers = probe.attention_layers(model, latent=True, query_scales=mends.query_scales)
    step_model = DeviceStepModel(model, KVLayout(layers, model.dtype), len(sequences), live=live, fixed=True)
    return played(step_model, sequences, cut), "; ".join(fused.notes)
