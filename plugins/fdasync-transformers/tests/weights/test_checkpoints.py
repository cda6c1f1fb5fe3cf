"""Random checkpoints: ordinary files, the same for a seed, whole or absent, and not degenerate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_trainer.replay.force import find_routers, observed_routing
from fdasync_transformers.tokenizer import load_tokenizer
from fdasync_transformers.weights import random_checkpoints
from fdasync_transformers.weights.random_checkpoints import EOS_ID, FAMILIES, VOCAB_SIZE, make_random_checkpoint
from structures import by_structure
from transformers import AutoModelForCausalLM, AutoTokenizer

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_random_checkpoint(root / family, family) for family in FAMILIES}


def tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.ci
@pytest.mark.parametrize("family", by_structure(FAMILIES))
def test_greedy_output_wanders_and_experts_are_used(folders: dict[str, Path], family: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders[family])
    distinct, used = [], {layer: set() for layer in find_routers(model)}
    for seed in range(3):
        prompt = torch.randint(0, 256, (1, 5 + 9 * seed), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            out = model.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
            seen: dict[int, torch.Tensor] = {}
            with observed_routing(model, seen):
                model(out)
        distinct.append(len(set(out[0, prompt.shape[1] :].tolist())))
        for layer, ids in seen.items():
            used[layer] |= set(ids.flatten().tolist())
    assert min(distinct) >= 16, distinct
    assert all(len(experts) == 16 for experts in used.values()), used
    first_dense = 0 if family == "qwen3_moe" else 1
    assert list(used) == list(range(first_dense, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_are_ordinary(folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS_ID
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert any(".experts.3.gate_proj.weight" in name for name in index["weight_map"]), "not the hub's layout"
    auto = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 世界 😀 <|im_end|>."
    assert auto(text).input_ids == load_tokenizer(str(folder)).encode(text)
    assert auto.eos_token_id == EOS_ID
    assert len(auto) == VOCAB_SIZE


def test_a_seed_means_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one = make_random_checkpoint(tmp_path / "a", size="tiny", seed=4)
    assert torch.equal(torch.rand(3), expected), "the global random state moved"
    two = make_random_checkpoint(tmp_path / "b", size="tiny", seed=4)
    other = make_random_checkpoint(tmp_path / "c", size="tiny", seed=5)
    assert tensors(one) == tensors(two)
    assert tensors(one) != tensors(other)


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path, **_options: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(random_checkpoints, "write_tokenizer", fail)
    with pytest.raises(KeyboardInterrupt):
        make_random_checkpoint(tmp_path / "model", size="tiny")
    assert list(tmp_path.iterdir()) == []


def test_taken_folders_and_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (make_random_checkpoint(tmp_path / "empty", size="tiny") / "config.json").exists()
    for arguments, field in [
        ({"folder": tmp_path / "empty"}, "folder"),
        ({"folder": tmp_path / "empty" / "config.json"}, "folder"),
        ({"folder": tmp_path / "x", "family": "gpt2"}, "family"),
        ({"folder": tmp_path / "x", "size": "huge"}, "size"),
        ({"folder": tmp_path / "x", "std": 0.0}, "std"),
    ]:
        with pytest.raises(BadInput) as caught:
            make_random_checkpoint(**arguments)
        assert caught.value.field == field
    assert not (tmp_path / "x").exists()
