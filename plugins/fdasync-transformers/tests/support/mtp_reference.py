"""Multi-token prediction as the library computes it: plain passes over whole sequences, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

if TYPE_CHECKING:
    from pathlib import Path


def load_reference(folder: Path, layers: int) -> tuple[Any, Any]:
    """The library's model and its MTP model, both loaded by the library."""
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = main.config.num_hidden_layers
    # classes name the layers of the released checkpoints alone
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + one}\." for one in range(layers)]
    return main, MtpModel.from_pretrained(main).eval()


@torch.no_grad()
def drafts_of(main: Any, mtp: Any, tokens: list[int], count: int) -> list[int]:
    """Drafts behind `tokens`, of which the last was sampled by the model from those before it.

    The library drafts one token a layer; more of them come from the last layer again, on its own hidden states.
    """
    ids = torch.tensor([tokens])
    hidden = main(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
    positions = torch.arange(1, len(tokens))[None]
    cache = MtpCache(config=main.config.get_mtp_config())
    seen: list[torch.Tensor] = []
    hook = mtp.layers[-1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        found, _, _ = mtp(ids[:, 1:], hidden, torch.ones_like(positions), positions, cache)
        drafts = found[0].tolist()[:count]
        while len(drafts) < count:
            embedded = main.get_input_embeddings()(torch.tensor([[drafts[-1]]]))
            position = torch.tensor([[len(tokens) + len(drafts) - 1]])
            angles = mtp.rotary_emb(embedded, position_ids=position)
            out = mtp.layers[-1](embedded, seen[-1][:, -1:], angles, None, position, cache)
            drafts.append(int(main.lm_head(out)[0, -1].argmax()))
    finally:
        hook.remove()
    return drafts
