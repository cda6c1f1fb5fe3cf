"""The KV of multi-token prediction (MTP) layers in the same paged blocks as the model's.

Layer k stores the KV of the token at position p there, at p: it is a function of this token and of a hidden state of
position p - 1, so a block's bytes depend on no token behind it. Positions up to k have none. The first token behind a
block needs the hidden states of the block's last token, and a sequence that starts on a cached block computes no such
token: so a block also holds these states (of the model and of all MTP layers but the last) of the last token in it that
is the sequence's own. They stand in a spec of their own, `CARRY`, which is stored per block and not per token. Knows
shapes; knows no steps. Called by `start/open_model.py` and `start/examine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import UnsupportedModel
from fdasync_transformers.model import probe
from fdasync_transformers.model.kv import KVLayout, LayerSpec, Reach
from fdasync_transformers.model.moe_layers import without_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from fdasync_transformers.mtp.head import MtpHead

#: words in the layout's name
LAYERS, CARRY = "mtp", "mtp-carry"


def mtp_specs(model: PreTrainedModel, head: MtpHead, *, latent: bool) -> tuple[LayerSpec, ...]:
    """The specs of the MTP layers, behind the model's own; may be on the meta device. Raises UnsupportedModel."""
    kind = str(model.config.model_type)
    log = _probed(model, head)
    first = int(model.config.num_hidden_layers)
    if sorted(log.layers) != list(range(first, first + head.depth)):
        raise UnsupportedModel(kind, "its MTP layers do not attend through the library's attention interface")
    specs = []
    for number, (module, heads, key_dim, value_dim, _) in enumerate(log.layers[index] for index in sorted(log.layers)):
        rank = probe.latent_rank(module) if latent else 0
        if rank:
            # a number, which torch does not know
            heads, key_dim, value_dim = 1, rank + int(module.qk_rope_head_dim), 0  # type: ignore[arg-type]
        window = int(getattr(head.config, "sliding_window", 0) or 0) if head.kind(number) != "full_attention" else 0
        reach = Reach("window", window, number + 1) if window else Reach(first=number + 1)
        specs.append(LayerSpec(first + number, heads, key_dim, value_dim, reach, rank, group=LAYERS))
    return tuple(specs)


def mtp_attention(model: PreTrainedModel, head: MtpHead, *, latent: bool) -> probe.Attention:
    """The attention of the MTP layers of a whole model; raises as `mtp_specs`."""
    log = _probed(model, head)
    names = {module: name for name, module in model.named_modules()}
    return probe.Attention(
        {layer.index: layer for layer in mtp_specs(model, head, latent=latent)},
        {index: names[note[0]] for index, note in sorted(log.layers.items())},
        dict(log.query_heads),
    )


def _probed(model: PreTrainedModel, head: MtpHead) -> probe.ProbeLog:
    """The notes of one pass of one token through the layers."""
    probe.register()
    log = probe.ProbeLog(str(model.config.model_type))
    before = head.config._attn_implementation
    head.config._attn_implementation = probe.PROBE
    try:
        place = torch.zeros(1, dtype=torch.long, device=model.device)
        width = int(model.config.hidden_size)
        states = torch.zeros(1, width, dtype=model.dtype, device=model.device)
        with torch.no_grad(), without_experts(head):
            for number in range(head.depth):
                states = head.run(model, number, place, place, states, fd_ctx=log)
    finally:
        head.config._attn_implementation = before
    return log


def with_mtp(
    layers: Sequence[LayerSpec], mtp: Sequence[LayerSpec], hidden_size: int, dtype: torch.dtype, block_tokens: int
) -> KVLayout:
    """The layout of blocks of a model's layers and its MTP layers.

    Args:
        block_tokens: asked for; 0: none, so that what a block carries must fit into the blocks that the layout chooses.
    """
    together = KVLayout((*layers, *mtp), dtype)
    tokens = block_tokens or together.choose_block_tokens()
    while True:
        layout = KVLayout((*together.layers, _carry(together, len(mtp) * hidden_size, tokens)), dtype)
        # more bytes a token never make longer blocks
        if block_tokens or layout.choose_block_tokens() >= tokens:
            return layout
        tokens = layout.choose_block_tokens()


def carry_of(layout: KVLayout) -> LayerSpec | None:
    """The spec of what blocks carry; None: the layout has no MTP layers."""
    return next((layer for layer in layout.layers if layer.group == CARRY), None)


def _carry(layout: KVLayout, elements: int, block_tokens: int) -> LayerSpec:
    """So many elements of each block, as equal parts of its tokens and shares."""
    width = -(-elements // (block_tokens * layout.shares))
    return LayerSpec(layout.layers[-1].index + 1, layout.shares, width, 0, per_block=True, group=CARRY)
