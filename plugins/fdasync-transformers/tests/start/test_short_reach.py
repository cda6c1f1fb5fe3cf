"""Large windows, chunks and temperature floors are crossed by the self-check, and are as they were after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.model import families, probe
from fdasync_transformers.start.short_reach import PLAYED_TOKENS, SHORT_TOKENS, short_reach, sizes_of
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from fdasync_transformers.tiny.shapes import YARN
from step_driver import Driver
from transformers.models.mistral4 import modeling_mistral4

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

LARGE = [
    ("gpt_oss", {"sliding_window": 4096}, "sliding_window"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window"),
    ("phimoe", {"sliding_window": 4096}, "sliding_window"),
    ("qwen2_moe_swa", {"sliding_window": 4096}, "sliding_window"),
    ("llama4_text", {"attention_chunk_size": 8192}, "attention_chunk_size"),
    ("llama4_text", {"floor_scale": 8192}, "floor_scale"),
]


def everything(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(holder)) for holder in (model.config, *model.modules())]


@pytest.mark.parametrize(("family", "size", "field"), LARGE)
def test_a_large_size_is_short_for_a_while(family: str, size: dict[str, int], field: str) -> None:
    model = make_tiny_model(family, **size)
    before = everything(model)
    assert sizes_of(model)[field] == size[field]
    with short_reach(model) as notes:
        assert getattr(model.config, field) == SHORT_TOKENS
        assert f"self-check: {field} {size[field]} played as {SHORT_TOKENS}" in notes
        assert not any(value == size[field] for holder in everything(model) for value in [holder.get(field)])
    assert everything(model) == before


def test_an_error_inside_leaves_nothing_short() -> None:
    model = make_tiny_model("gpt_oss", sliding_window=4096)
    before = everything(model)
    with pytest.raises(RuntimeError, match="inside"), short_reach(model):
        raise RuntimeError("inside")
    assert everything(model) == before


def test_the_floor_of_a_temperature_by_position_is_short_for_a_while() -> None:
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    model = make_tiny_model("mistral4", rope_parameters=rope)
    held = model.config.rope_parameters
    before = dict(held)
    with short_reach(model):
        assert held == {**before, "original_max_position_embeddings": SHORT_TOKENS}
    assert model.config.rope_parameters is held
    assert held == before


async def test_a_floor_of_a_temperature_by_position_that_is_lost_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    make_tiny_checkpoint(tmp_path, "mistral4", rope_parameters=rope)
    honest = modeling_mistral4.get_llama_4_attn_scale
    # as if a paged batch counted its rows
    monkeypatch.setattr(
        modeling_mistral4, "get_llama_4_attn_scale",
        lambda positions, *rest: honest(torch.arange(positions.shape[-1]).expand_as(positions), *rest),
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path)


def test_small_sizes_are_crossed_as_they_are() -> None:
    model = make_tiny_model("gpt_oss", sliding_window=PLAYED_TOKENS)
    with short_reach(model) as notes:
        assert notes == ()
        assert model.config.sliding_window == PLAYED_TOKENS


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(("family", "size", "field"), LARGE)
async def test_a_model_is_served_with_its_own_sizes(
    tmp_path: Path, family: str, size: dict[str, int], field: str
) -> None:
    make_tiny_checkpoint(tmp_path, family, **size)
    driver = await Driver.open(tmp_path)
    assert any(f"{field} {size[field]} played as" in note for note in driver.capacity.notes)
    layers = driver.runner.opened.model.step_model.layout.layers
    reaches = {layer.reach.size for layer in layers} - {0}
    scales = {layer.query_scale[0] for layer in layers if layer.query_scale}
    assert SHORT_TOKENS not in reaches | scales
    assert size[field] in reaches | scales
    await driver.close()


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(("family", "size", "field"), [case for case in LARGE if case[2] != "floor_scale"])
async def test_a_large_window_that_is_lost_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, size: dict[str, int], field: str
) -> None:
    make_tiny_checkpoint(tmp_path, family, **size)
    monkeypatch.setattr(probe, "_reach", lambda *_: probe.Reach())
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path)


async def test_a_query_temperature_with_a_high_floor_that_is_lost_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "llama4_text", floor_scale=8192)
    monkeypatch.setattr(families, "mend", lambda _: families.Mends((), None, ()))
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path)


async def test_a_window_that_only_a_longer_sequence_crosses_is_crossed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # longer than the sequences of a model without windows
    make_tiny_checkpoint(tmp_path, "gpt_oss", sliding_window=128)
    monkeypatch.setattr(probe, "_reach", lambda *_: probe.Reach())
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path)
