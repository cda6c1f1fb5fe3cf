"""Multi-token prediction (MTP) layers at a start: how many are loaded, the layout of their KV, and what they cost.

Knows checkpoints and models; knows no steps. Called by `open_model.py` and `examine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ConfigError, InvariantBroken
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.mtp.names import stored_layers, told_layers
from fdasync_transformers.mtp.specs import mtp_attention, mtp_specs, with_mtp
from fdasync_transformers.start.runner_config import uses_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.model.kv import KVLayout, LayerSpec
    from fdasync_transformers.model.probe import Attention
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.weights import loading


def count_mtp(checkpoint: loading.Checkpoint, config: TransformersConfig) -> int:
    """How many multi-token prediction layers are to be loaded. Raises ConfigError where there are none to be had."""
    if not config.mtp:
        return 0
    if checkpoint.architecture.whole is not None:
        problem = f"the language model of a {checkpoint.model_type} checkpoint has no names for them"
        raise ConfigError("runner_config.mtp", problem, hint="leave it out")
    own = int(getattr(checkpoint.config, "num_hidden_layers", 0) or 0)
    drawn = config.weights == "random"
    count = told_layers(checkpoint.config) if drawn else stored_layers(checkpoint.tensors, own)
    if not count:
        problem = f"{checkpoint.folder} has no multi-token prediction layers"
        raise ConfigError("runner_config.mtp", problem, hint="leave it out")
    return count


def mtp_layout(
    model: PreTrainedModel, config: TransformersConfig, limits: RunnerLimits, device: torch.device
) -> Callable[[Sequence[LayerSpec]], KVLayout]:
    """Makes the layout of a model with multi-token prediction layers. Raises UnsupportedModel, and ConfigError for
    layers that the device has no kernels for."""
    head = head_of(model)
    if head is None:
        raise InvariantBroken("the layout of layers that were not built")
    mtp = mtp_specs(model, head, latent=config.latent_mla)
    if uses_kernels(config, device) and (short := [layer.reach.kind for layer in mtp if layer.reach.kind != "full"]):
        problem = f"its multi-token prediction layers see a {short[0]} of tokens, for which there are no kernels"
        raise ConfigError("runner_config.mtp", problem, hint="leave it out")
    return lambda layers: with_mtp(layers, mtp, int(model.config.hidden_size), model.dtype, limits.block_tokens or 0)


def attention_of_mtp(model: PreTrainedModel, config: TransformersConfig) -> Attention | None:
    """The attention of a whole model's multi-token prediction layers; None: it has none. Raises UnsupportedModel."""
    head = head_of(model)
    return None if head is None else mtp_attention(model, head, latent=config.latent_mla)


def mtp_note(model: PreTrainedModel, layout: KVLayout) -> str:
    """What the multi-token prediction layers cost, for people."""
    head = head_of(model)
    weights = sum(tensor.nbytes for tensor in head.state_dict().values()) if head is not None else 0
    kv = layout.token_nbytes - sum(x.token_elements for x in layout.layers if not x.group) * layout.dtype.itemsize
    count = 0 if head is None else head.depth
    return f"multi-token prediction: {count} layers, {weights:,} bytes of weights, {kv:,} bytes of KV a token"
