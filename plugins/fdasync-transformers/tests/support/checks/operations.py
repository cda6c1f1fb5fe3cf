"""What is fused in each family of the catalogue, and that whole forward passes stay what they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fdasync_transformers.fused.dense import Gates
from fdasync_transformers.fused.norms import Norms
from fdasync_transformers.fused.operations import fuse_operations, operations_of
from fdasync_transformers.fused.replacement import foresee
from fdasync_transformers.fused.rotary import Rotary
from fdasync_transformers.tiny.families import FAMILIES

if TYPE_CHECKING:
    from made import Made

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS = 11

# norms, rotary embeddings and gates that are fused, and classes that keep the library's code for a reason
EXPECTED = {
    "afmoe": (25, 2, 4, ""),
    "aria_text": (9, 4, 4, ""),
    "axk1": (20, 4, 4, ""),
    "axk2": (17, 4, 4, "AXK2GatedRMSNorm AXK2Indexer"),
    "bailing_hybrid": (10, 1, 4, "BailingHybridRMSNormGated"),
    "beam": (25, 2, 1, ""),
    "cohere2_moe": (0, 2, 4, ""),
    "dbrx": (0, 4, 0, ""),
    "deepseek_v2": (17, 4, 4, ""),
    "deepseek_v3": (17, 4, 4, ""),
    "deepseek_v32": (17, 4, 4, "DeepseekV32Indexer"),
    "deepseek_v4": (36, 6, 0, "DeepseekV4MLP"),
    "doge": (17, 4, 0, "DogeCDMoE"),
    "dots1": (17, 4, 4, ""),
    "dots3_note_text": (21, 4, 4, "Dots3NoteTextIndexer"),
    "ernie4_5_moe": (9, 4, 4, ""),
    "exaone_moe": (17, 2, 4, ""),
    "flex_olmo": (17, 4, 0, ""),
    "flint": (17, 2, 4, ""),
    "gemma4_text": (50, 4, 4, ""),
    "glm4_moe": (17, 4, 4, ""),
    "glm4_moe_lite": (17, 4, 4, ""),
    "glm_moe_dsa": (17, 4, 4, "GlmMoeDsaIndexer"),
    "gpt_oss": (9, 4, 0, ""),
    "granitemoe": (9, 4, 0, ""),
    "granitemoe_swa": (9, 4, 4, ""),
    "granitemoehybrid": (9, 0, 4, "GraniteMoeHybridRMSNormGated"),
    "granitemoeshared": (9, 4, 4, ""),
    "hunyuan_v1_moe": (17, 4, 4, ""),
    "hy_v3": (17, 4, 4, ""),
    "hy_v4": (17, 4, 4, "HYV4UnweightedRMSNorm HYV4Indexer"),
    "inkling_text": (18, 0, 0, "InklingMLP"),
    "inkling2_text": (26, 0, 0, ""),
    "jamba": (15, 0, 2, ""),
    "jetmoe": (9, 4, 0, ""),
    "kimi_k2": (17, 4, 4, ""),
    "kimi_linear": (10, 0, 4, "KimiLinearRMSNormGated"),
    "kolibri1": (25, 2, 4, ""),
    "laguna": (17, 4, 4, ""),
    "lfm2_moe": (13, 2, 1, ""),
    "llama4_text": (9, 3, 4, ""),
    "longcat_flash": (17, 4, 4, ""),
    "mellum": (17, 4, 1, ""),
    "mimo_v2_flash": (9, 4, 1, ""),
    "minimax": (11, 2, 0, ""),
    "minimax_m2": (17, 4, 0, ""),
    "minimax_m3_vl_text": (17, 4, 0, "MiniMaxM3VLDenseMLP"),
    "mistral4": (17, 4, 4, ""),
    "mixtral": (9, 4, 0, ""),
    "nemotron_h": (5, 0, 0, "NemotronHRMSNormGated"),
    "olmoe": (17, 4, 0, ""),
    "phimoe": (0, 4, 0, ""),
    "qwen2_moe": (9, 4, 4, ""),
    "qwen3_5_moe_text": (11, 1, 4, "Qwen3_5MoeRMSNormGated"),
    "qwen3_moe": (17, 4, 1, ""),
    "qwen3_next": (11, 1, 4, "Qwen3NextRMSNormGated"),
    "qwen4_exp_text": (8, 2, 4, "Qwen4ExpTextRMSNormGated Qwen4ExpTextRMSNorm Qwen4ExpTextQSAIndexer"),
    "solar_open": (9, 4, 4, ""),
    "zaya": (13, 4, 0, ""),
    "cohere2_moe_sigmoid": (0, 2, 0, ""),
    "gemma4_text_26b": (45, 4, 4, ""),
    "granitemoehybrid_attention": (9, 4, 4, ""),
    "minimax_m3_sparse": (23, 7, 0, "MiniMaxM3VLDenseMLP"),
    "moonlight": (13, 4, 4, ""),
    "qwen2_moe_swa": (9, 4, 4, ""),
    "qwen3_dense": (17, 4, 4, ""),
    "qwen3_moe_swa": (17, 4, 0, ""),
    "qwen4_exp_indexed": (16, 4, 4, "Qwen4ExpTextRMSNorm Qwen4ExpTextQSAIndexer"),
    "gemma4": (46, 4, 4, ""),
    "glm4v_moe": (9, 4, 4, ""),
    "llama4": (9, 3, 4, ""),
    "minimax_m3_vl": (17, 4, 0, "MiniMaxM3VLDenseMLP"),
    "qwen3_5_moe": (11, 1, 4, "Qwen3_5MoeRMSNormGated"),
    "qwen3_vl_moe": (17, 4, 0, ""),
}

# recurrences and indexers make more of a last place
NEAR = {True: 2e-4, False: 1e-5}
# of others the code is that of a family of these
BY_DAY = (
    "deepseek_v2", "ernie4_5_moe", "gemma4_text", "glm4_moe", "gpt_oss", "flex_olmo", "cohere2_moe", "llama4_text",
    "qwen3_moe", "beam", "granitemoeshared", "hunyuan_v1_moe", "mimo_v2_flash", "longcat_flash", "qwen3_next",
    "nemotron_h", "minimax_m3_vl_text", "qwen3_vl_moe",
)  # fmt: skip


def answers_as_before(made: Made) -> None:
    family = made.family
    norms, rotary, dense, own = EXPECTED[family]
    model = made.model().to(DEVICE)
    # what the experts compute is not looked at, and the other ways have limits on a device
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        foreseen = {type(one): foresee(one, model) for one in operations_of(model)}
        assert not any("forward" in vars(module) for module in model.modules())
        fused = fuse_operations(model)
        for kind, found in fused.items():
            # what is not foreseen as refused is replaced, or its proof failed
            assert {*found.names} <= {*foreseen[kind].names}
            assert foreseen[kind].reasons.items() <= found.reasons.items()
        shown = [fused[kind] for kind in (Norms, Rotary, Gates)]
        assert [len(each.names) for each in shown] == [norms, rotary, dense], shown
        assert {kind for each in shown for kind in each.reasons} == set(own.split())
        replaced = {name for each in fused.values() for name in each.names}
        assert replaced == {name for name, module in model.named_modules() if "forward" in vars(module)}
        after = model(ids, use_cache=False).logits
        near = NEAR[bool(FAMILIES[family].refused) or FAMILIES[family].whole_only] * float(before.abs().max())
        torch.testing.assert_close(after, before, rtol=0, atol=near)
