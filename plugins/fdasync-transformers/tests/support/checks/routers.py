"""Routers of a family are fused, or a note says why; ids, rows and outputs are the library's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.routers import fuse_routers
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.tiny.families import FAMILIES
from structures import parted

from fdasync.errors import UnsupportedModel
from fdasync.gpu.capture import CaptureBuffer

if TYPE_CHECKING:
    from made import Made

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS = 13
# experts without ids, so nothing to record and no layers
NO_LAYERS = {"doge", "jetmoe"}
# class of the router, and words of the note
LEFT = {
    "dbrx": "DbrxRouter makes logits, and the block around it chooses",
    "deepseek_v4": "DeepseekV4HashRouter chooses by the token's id",
    "inkling_text": "InklingTopkRouter weighs shared experts with the chosen ones",
    "llama4": "Llama4Router scores all experts",
    "llama4_text": "Llama4Router scores all experts",
    "zaya": "ZayaRouter is a network with a state",
}
# a family of each form of `router_kinds.py`, and the class of its routers
FORMS = {
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "jamba": "JambaTopKRouter",
    "hunyuan_v1_moe": "HunYuanMoEV1Gate",
    "gemma4_text": "Gemma4TextRouter",
    "granitemoe": "GraniteMoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "cohere2_moe_sigmoid": "Cohere2MoeTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
    "axk2": "AXK2TopkRouter",
    "deepseek_v2": "DeepseekV2TopkRouter",
    "mistral4": "Mistral4TopkRouter",
    "minimax_m3_vl_text": "MiniMaxM3VLTopKRouter",
    "minimax_m2": "MiniMaxM2TopKRouter",
    "hy_v3": "HYV3TopKRouter",
    "afmoe": "AfmoeTokenChoiceRouter",
    "lfm2_moe": "Lfm2MoeTopKRouter",
    "deepseek_v4": "DeepseekV4TopKRouter",
    "laguna": "LagunaTopKRouter",
    "flint": "FlintTopKRouter",
    "kolibri1": "Kolibri1TopKRouter",
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter",
    "longcat_flash": "LongcatFlashTopkRouter",
    "phimoe": "PhimoeTopKRouter",
}
PLAYED = parted(
    [name for name, entry in FAMILIES.items() if not entry.quantised and not entry.dense],
    also=FORMS,
    ahead=("gpt_oss", "gemma4_text", "granitemoe", "jamba", "deepseek_v3"),
)


@torch.inference_mode()
def run(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 50, (1, TOKENS), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return model(ids, use_cache=False).logits


def fused_or_says_why(made: Made) -> None:
    family, model = made.family, made.model().to(DEVICE)
    model.set_experts_implementation("eager")
    if family in FORMS:
        assert FORMS[family] in {type(module).__name__ for module in model.modules()}
    if family in NO_LAYERS:
        with pytest.raises(UnsupportedModel, match="handed no expert ids"):
            find_moe_layers(model)
        return
    layers = find_moe_layers(model)
    assert layers is not None
    chosen: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(layers.ids))}
    for row, name in enumerate(layers.names):
        experts = model.get_submodule(name)
        experts.register_forward_pre_hook(lambda _, args, row=row: chosen[row].append(args[1] if args[1:] else None))
    capture = CaptureBuffer(TOKENS, layers.spec, DEVICE)
    before = run(model)
    fused = fuse_routers(model, layers)
    fused.attach(capture)
    if family in LEFT:
        assert len(fused.notes) == 1
        assert LEFT[family] in fused.notes[0]
        assert len(fused.rows) < len(layers.ids)
    else:
        assert fused.notes == ()
        assert fused.rows == tuple(range(len(layers.ids)))
    capture.begin()
    after = run(model)
    torch.testing.assert_close(after, before, rtol=2e-4, atol=2e-4)
    rows = capture.stage(TOKENS)
    for row in fused.rows:
        library, ours = chosen[row]
        assert ours.dtype == torch.int64
        assert torch.equal(library.sort(-1).values, ours.sort(-1).values), f"layer row {row} chose others"
        assert torch.equal(rows[:, row, : layers.top_k[row]].long(), ours), "other ids were recorded"
