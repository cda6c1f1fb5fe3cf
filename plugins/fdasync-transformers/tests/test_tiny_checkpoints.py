"""The maker of tiny checkpoints: the same for the same seed, random in every part, of every entry of the catalogue."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from checks.models import its_output_wanders
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, tiny_config
from fdasync_transformers.tiny.families import FAMILIES, family_of
from made import Made
from structures import parted

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci(after=11)
@pytest.mark.parametrize("name", parted(FAMILIES).by_day)
def test_every_entry_makes_a_model_whose_output_wanders(tmp_path: Path, name: str) -> None:
    its_output_wanders(Made(name, tmp_path))


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
