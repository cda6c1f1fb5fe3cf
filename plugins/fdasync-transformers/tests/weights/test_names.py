"""Names on disk: every family's tensors equal the library's own load, also those that are converted or wrapped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from checks.weights import (
    CONVERTED,
    PLAIN,
    WRAPPED,
    a_text_half_is_that_of_the_whole,
    by_library,
    names_may_be_of_the_whole_or_of_the_text,
    tensors_are_the_librarys,
)
from fdasync_transformers import named_tensors
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import CPU, Live, assert_equal, stored
from made import Made
from safetensors.torch import save_file
from written import write_tiny_checkpoint

from fdasync.errors import CheckpointError, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", PLAIN.by_day)
def test_tensors_equal_those_that_the_library_loads(tmp_path: Path, family: str) -> None:
    tensors_are_the_librarys(Made(family, tmp_path))


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", WRAPPED.by_day)
def test_a_text_half_has_the_values_of_the_whole(tmp_path: Path, family: str) -> None:
    a_text_half_is_that_of_the_whole(Made(family, tmp_path))


@pytest.mark.parametrize("family", CONVERTED)
def test_conversions_are_counted(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    checkpoint = loading.read_checkpoint(str(tmp_path))
    model = loading.build(checkpoint, "auto")
    notes = loading.fill(model, checkpoint, loading.names_of(checkpoint, model), CPU)
    assert any(note.endswith("tensors converted by the library") for note in notes)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", ["llama4", "minimax_m3_vl", "qwen3_vl_moe", "kimi_k2"])
def test_a_folder_updates_a_wrapped_renamed_or_converted_model(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path / "old", family, seed=0)
    write_tiny_checkpoint(tmp_path / "new", family, seed=1)
    live, fresh = Live(tmp_path / "old"), Live(tmp_path / "new")
    wanted = identity.weights_id(fresh.model)
    assert live.weights.read_weights_id(str(tmp_path / "new")) == wanted
    assert live.weights.load_folder(str(tmp_path / "new")) == wanted
    assert_equal(live.state(), fresh.state())
    assert live.now() == live.addresses


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("of_whole", [True, False], ids=["whole", "text"])
@pytest.mark.parametrize("family", WRAPPED.by_day)
def test_tensors_may_have_the_names_of_the_whole_or_of_the_text_model(
    tmp_path: Path, family: str, *, of_whole: bool
) -> None:
    names_may_be_of_the_whole_or_of_the_text(Made(family, tmp_path), of_whole=of_whole)


def test_a_tensor_that_is_made_of_several_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "minimax_m3_vl")
    live = Live(tmp_path)
    before = live.state()
    with pytest.raises(WeightsRejected, match=r"is one of several that the library makes \S+ of: give that tensor"):
        live.send(named_tensors(stored(tmp_path)))
    assert_equal(live.state(), before)


def test_a_converted_tensor_in_its_older_form_is_told_the_shape_of_the_model(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_vl_moe")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    older = stored(tmp_path)[name].transpose(1, 2)
    with pytest.raises(WeightsRejected, match=rf"{name} has shape \(8, 16, 32\), the model has \(8, 32, 16\)"):
        Live(tmp_path).send(named_tensors({name: older}))


def test_unknown_tensors_of_the_language_model_are_no_parts_beside_it(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama4")
    tensors = stored(tmp_path)
    name = "language_model.model.layers.0.self_attn.extra.weight"
    save_file({**tensors, name: torch.ones(2)}, tmp_path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no place for: .*extra"):
        loading.load(loading.read_checkpoint(str(tmp_path)), "auto", CPU)


def test_language_weights_that_are_missing_are_told_of_a_wrapper(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "gemma4")
    tensors = stored(tmp_path)
    gone = "model.language_model.layers.1.self_attn.q_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != gone}, tmp_path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        loading.load(loading.read_checkpoint(str(tmp_path)), "auto", CPU)


def test_tensors_that_a_folder_may_lack_are_as_the_library_makes_them(tmp_path: Path) -> None:
    """A.X-K1's folders may lack the correction bias of its routers."""
    write_tiny_checkpoint(tmp_path, "axk1")
    tensors = stored(tmp_path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / SINGLE_FILE, {"format": "pt"})
    # memory that was in use before holds no zeros
    torch.full((1 << 16,), 7.0)
    ours = loading.load(loading.read_checkpoint(str(tmp_path)), "auto", CPU).state_dict()
    assert_equal(ours, by_library(tmp_path).state_dict())
    assert not any(ours[name].any() for name in tensors.keys() - kept.keys())


def test_ties_are_those_of_the_whole(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama4")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["tie_word_embeddings"], raw["text_config"]["tie_word_embeddings"] = True, False
    path.write_text(json.dumps(raw))
    tensors = stored(tmp_path)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    model = loading.load(loading.read_checkpoint(str(tmp_path)), "auto", CPU)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
