"""What the benchmarks of serving count with: bytes of a step, models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.model.moe_layers import find_experts, find_moe_layers
from fdasync_transformers.model.recurrent.probe import find_state
from fdasync_transformers.weights import loading

from benchmarks.gpu.floor import StepBytes, bytes_of, distinct
from benchmarks.gpu.models import HYBRID_MODEL, MODELS
from benchmarks.gpu.scale import large, tiny, write_folder
from benchmarks.lib.published_shapes import MORE
from tests.nightly.shapes.folder import empty_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

CPU = torch.device("cpu")
GB = 1e9


def plain_model(folder: Path, name: str) -> Any:
    checkpoint = loading.read_checkpoint(write_folder(folder, tiny(name)), with_tensors=False)
    return loading.draw(checkpoint, "float32", CPU)


def whole_model(folder: Path, config: dict[str, Any]) -> Any:
    """On the meta device."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return empty_model(folder)


def test_experts_are_counted_once_and_the_rest_by_what_runs() -> None:
    counted = StepBytes(dense=1000, embedding_row=10, expert=(7, 5), num_experts=8, top_k=(2, 1), kv_token=3)
    # one token chooses its own, and many tokens all
    assert counted.expected(1) == pytest.approx([2, 1])
    assert counted.expected(2) == pytest.approx([8 * (1 - 0.75**2), 8 * (1 - 0.875**2)])
    assert counted.expected(500) == pytest.approx([8, 8])
    assert counted.step(1, 100) == pytest.approx(1000 + 10 + 2 * 7 + 1 * 5 + 300)
    assert counted.step(500, 100) == pytest.approx(1000 + 5000 + 8 * 7 + 8 * 5 + 500 * 300)


def test_bytes_of_a_published_shape_are_those_that_were_computed_by_hand(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 9.437 MB an expert, 2.46 GB dense with the head, 98,304 bytes of KV a token."""
    model = whole_model(tmp_path, large("qwen3-30b-a3b").config)
    moe = find_moe_layers(model, lambda: model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta")))
    counted = bytes_of(model, moe, 98_304)
    assert set(counted.expert) == {3 * 768 * 2048 * 2}
    assert counted.dense / GB == pytest.approx(1.837 + 0.622, abs=0.005)
    assert counted.embedding_row == 4096
    assert counted.step(1, 1024) / GB == pytest.approx(6.184, abs=0.005)
    assert counted.step(64, 1024) / GB == pytest.approx(65.953, abs=0.005)
    assert counted.step(256, 1024) / GB == pytest.approx(86.213, abs=0.005)


def test_shared_experts_are_dense_and_a_tied_head_is_read(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "deepseek-v2-lite")
    moe = find_moe_layers(model)
    counted = bytes_of(model, moe, 1)
    everything = sum(tensor.nbytes for tensor in model.parameters())
    embedding = model.get_input_embeddings().weight
    assert len(counted.expert) == 2
    assert counted.dense + sum(counted.expert) * 16 + embedding.nbytes == everything
    model.lm_head.weight = embedding
    assert bytes_of(model, moe, 1).dense == counted.dense


def test_distinct_experts_of_a_layer_are_a_mean_over_steps_and_layers() -> None:
    # [steps, sequences, layers, k]
    rows = np.array([[[[0, 1], [2, 3]], [[0, 1], [4, 5]]], [[[0, 1], [2, 3]], [[2, 3], [2, 7]]]], np.uint8)
    assert distinct(rows, 8) == (2 + 4 + 4 + 3) / 4


# the hybrid one fits smaller GPUs, too
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {HYBRID_MODEL}))
def test_layers_are_as_many_as_fit(name: str, tmp_path: Path) -> None:
    """120 GB hold weights and the KV of 256 contexts, and would not hold another layer."""
    served, scale = MODELS[name], large(name)
    latent = scale.config.get("kv_lora_rank")
    width = (
        latent + scale.config["qk_rope_head_dim"]
        if latent
        else 2 * scale.config["num_key_value_heads"] * scale.config["head_dim"]
    )

    def nbytes(layers: int) -> float:
        weights = sum(tensor.nbytes for tensor in whole_model(tmp_path, served.shape.cut(layers)).parameters())
        return float(weights + layers * 2 * width * 256 * scale.blocks_each * scale.block_tokens)

    assert nbytes(served.layers) <= 120 * GB
    assert served.layers == served.shape.most_layers or nbytes(served.layers + 1) > 120 * GB


def test_deepseek_v2_lite_is_what_was_published(tmp_path: Path) -> None:
    model = whole_model(tmp_path, MORE["DeepSeek-V2-Lite"].config)
    # 15.7 billion, of which a token uses 2.4
    assert sum(tensor.numel() for tensor in model.parameters()) / 1e9 == pytest.approx(15.7, abs=0.05)
    experts = find_experts(model)
    assert (len(experts), {one.num_experts for one in experts.values()}) == (26, {64})


def test_qwen3_next_is_what_was_published(tmp_path: Path) -> None:
    model = whole_model(tmp_path, MORE["Qwen3-Next-80B-A3B"].config)
    assert sum(tensor.numel() for tensor in model.parameters()) / 1e9 == pytest.approx(79.7, abs=0.1)
    state = find_state(model)
    assert state is not None
    # 36 layers, as much as the KV of 3,168 tokens
    assert (len(state.parts), state.nbytes) == (36, 77_856_768)
