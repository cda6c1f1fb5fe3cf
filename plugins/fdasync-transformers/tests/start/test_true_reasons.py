"""A refusal at the start names the true reason: no attention, attention in some layers, logits that are no numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.start import capacity
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.tiny.shapes import BASE
from fdasync_transformers.weights.quiet import no_progress_bars
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import stored
from safetensors.torch import save_file
from step_driver import Driver
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, kind: str) -> None:
    """A model that is none of the catalogue: it has no experts."""
    config = AutoConfig.for_model(kind, **BASE)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    with no_progress_bars():
        model.save_pretrained(folder)


async def refused(folder: Path, **config: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        await Driver.open(folder, config=config)
    return caught.value.reason


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("kind", ["rwkv", "mpt"])
async def test_a_model_without_attention_of_the_librarys_interface(
    tmp_path: Path, kind: str, *, self_check: bool
) -> None:
    make(tmp_path, kind)
    assert "of its 4 layers none attend through the library's" in await refused(tmp_path, self_check=self_check)


async def test_a_mask_that_hangs_on_values_is_told_of_a_dense_model_too(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "doge", is_moe=False)
    assert "a dynamic mask, which picks keys by their values (model.layers.0.self_attn)" in await refused(tmp_path)


async def test_attention_that_is_not_handed_the_arguments_of_the_call(tmp_path: Path) -> None:
    make(tmp_path, "stablelm")
    assert "StableLmAttention is not handed the arguments of the model's call" in await refused(tmp_path)


async def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "mixtral")
    tensors = stored(tmp_path)
    tensors["lm_head.weight"][3, 0] = float("nan")
    save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    assert "its logits are not finite in float32, also without paging" in await refused(tmp_path)


async def test_a_failure_after_the_check_blames_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "mixtral")

    def fail(*_: Any, **__: Any) -> float:
        raise ValueError("a bug")

    monkeypatch.setattr(capacity, "prefill_tokens_per_s", fail)
    assert "opening it fails: ValueError: a bug" in await refused(tmp_path)
