"""Logits of a rollout with fixed numerics by kernels, all of it fused as at a runner's start."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.slices import Slices
from fdasync_transformers.parallel.sums import Sums
from fdasync_transformers.start.fuse import fuse, set_plain_experts
from fdasync_transformers.start.runner_config import TransformersConfig
from rank_models import cut_for
from rollout_bits import played

from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    import torch

    from fdasync.ipc.exchange import Exchange


def device_rollout_logits(
    model: Any, sequences: list[torch.Tensor], cut: int = 33, *, slices: int = 1, exchange: Exchange | None = None
) -> tuple[torch.Tensor, str]:
    """As `rollout_logits`, and what was fused, for people. `slices`: of sums; with an exchange one of several ranks."""
    # in the interpreter nothing is fused unless it is asked for
    here: dict[str, Any] = {} if model.device.type == "cuda" else {"experts": "fused", "fused_layers": True}
    config = TransformersConfig(kernels="triton", **here)
    limits = RunnerLimits(max_running=len(sequences), max_step_tokens=1024, numerics="fixed")
    model.eval()
    sharded, sums = None, None
    if slices > 1:
        planned = Slices(copy.deepcopy(model).to("meta"), slices, latent=True)
        collectives = None if exchange is None else HostCollectives(exchange)
        if exchange is not None and collectives is not None:
            sharded, sums = cut_for(model, exchange), Sums(collectives, {})
        planned.attach(model, collectives, kernels=True)
    experts = find_moe_layers(model)
    set_plain_experts(model, config, experts, limits)
    mends = families.mend(model)
    live = LiveRows()
    fused = fuse(model, config, experts, live, limits, sums)
    layers = probe.attention_layers(model, latent=True, query_scales=mends.query_scales)
    layout = KVLayout(layers, model.dtype) if sharded is None else sharded.layout(layers)
    step_model = DeviceStepModel(model, layout, len(sequences), live=live, fixed=True)
    return played(step_model, sequences, cut), "; ".join(fused.notes)
