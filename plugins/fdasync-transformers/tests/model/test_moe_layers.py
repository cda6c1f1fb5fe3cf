"""MoE layers are found in the model; experts without ids are refused, and the library's errors blame no checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.model.moe_layers import find_experts, find_moe_layers
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from step_driver import Driver

from fdasync.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("family", "ids", "experts", "top_k"),
    [
        # its config counts dense layers under a name of its own
        ("afmoe", (1, 2, 3), 8, (3, 3, 3)),
        # experts beside the dense part of every layer, and another name for k
        ("gemma4_text", (0, 1, 2, 3), 8, (3, 3, 3, 3)),
        # blocks, and the weights of all experts in one matrix
        ("dbrx", (0, 1, 2, 3), 8, (3, 3, 3, 3)),
        ("hunyuan_v1_moe", (0, 1, 2, 3), 8, (2, 3, 1, 2)),
    ],
)
def test_layers_come_from_the_modules(family: str, ids: tuple[int, ...], experts: int, top_k: tuple[int, ...]) -> None:
    found = find_moe_layers(make_tiny_model(family))
    assert found is not None
    assert (found.ids, found.num_experts, found.top_k) == (ids, experts, top_k)


def test_a_model_without_experts_has_no_layers() -> None:
    assert find_moe_layers(make_tiny_model("qwen3_dense")) is None
    # of a family with experts, none in this one
    assert find_moe_layers(make_tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])) is None


@pytest.mark.parametrize("family", ["doge", "jetmoe"])
def test_experts_without_ids_are_refused_by_their_class(family: str) -> None:
    model = make_tiny_model(family)
    with pytest.raises(UnsupportedModel, match="handed no expert ids"):
        find_experts(model)


def test_experts_in_a_list_are_refused_also_beside_others() -> None:
    model = make_tiny_model("mixtral")
    model.model.layers[3].mlp.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8))
    with pytest.raises(UnsupportedModel, match=r"layers\.3\.mlp\.experts \(ModuleList\) is handed no expert ids"):
        find_experts(model)


async def test_such_a_model_is_served_without_routing(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "jetmoe")
    driver = await Driver.open(tmp_path, capture=False)
    assert driver.capacity.aux_specs == ()
    sequence = driver.sequence([5, 6, 7, 8], 6)
    await driver.run([sequence])
    wanted = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert sequence.tokens == wanted[0, 4:].tolist()
    await driver.close()


async def test_routing_of_a_dense_model_is_asked_for_in_vain(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_dense")
    with pytest.raises(ConfigError, match="has no MoE layers"):
        await Driver.open(tmp_path, capture=True)


@pytest.mark.parametrize("stage", ["experts", "attention"])
async def test_an_error_of_the_librarys_code_is_no_broken_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    layer: Any = model.model.layers[0]
    kind = type(layer.mlp) if stage == "experts" else type(layer.self_attn)

    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a bug of the library")

    monkeypatch.setattr(kind, "forward", fail)
    with pytest.raises(UnsupportedModel, match="a plain pass of one token fails: TypeError: a bug"):
        await Driver.open(tmp_path)
