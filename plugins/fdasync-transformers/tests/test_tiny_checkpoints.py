"""The maker of tiny checkpoints: the same for the same seed, random in every part, of every entry of the catalogue."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from fdasync_transformers.tiny.checkpoints import _KEPT, make_tiny_checkpoint, make_tiny_model, tiny_config
from fdasync_transformers.tiny.families import FAMILIES, family_of
from structures import by_structure

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci(after=11)
@pytest.mark.parametrize("name", by_structure(FAMILIES))
def test_every_entry_makes_a_model_whose_output_wanders(name: str) -> None:
    state = torch.random.get_rng_state()
    model = make_tiny_model(name)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 33)[None], use_cache=False).logits
    assert logits.argmax(-1).unique().numel() > 8
    for key, value in model.state_dict().items():
        assert value.isfinite().all()
        if value.is_floating_point() and value.numel() > 1 and not key.endswith(_KEPT):
            assert value.unique().numel() > value.numel() // 2, key


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_checkpoint(tmp_path / name, "gpt_oss", seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c"))
    assert one == same != other
    assert (tmp_path / "a" / "tokenizer.json").exists()


@pytest.mark.ci
def test_forms_of_a_checkpoint(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "kimi_k2", "kimi_k2")
    assert json.loads((tmp_path / "kimi_k2" / "config.json").read_text())["model_type"] == "kimi_k2"
    make_tiny_checkpoint(tmp_path / "llama4", "llama4")
    config = json.loads((tmp_path / "llama4" / "config.json").read_text())
    assert config["architectures"] == ["Llama4ForConditionalGeneration"]
    make_tiny_checkpoint(tmp_path / "fp8", "qwen3_moe_fp8")
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    make_tiny_checkpoint(tmp_path / "shards", "qwen3_moe", shards=True, num_hidden_layers=2)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "shards" / "config.json").read_text())["num_hidden_layers"] == 2


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(BadInput, match="is not known"):
        tiny_config("no_such_family")


def test_variants_count_with_a_family_of_the_catalogue() -> None:
    for name, entry in FAMILIES.items():
        family = family_of(name)
        assert family in FAMILIES or family in ("minimax_m3_vl", "qwen3"), name
        assert not (entry.refused and entry.replay_refused), name
