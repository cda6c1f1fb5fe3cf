"""A report of a checkpoint says what loading it finds; refusals are told, broken folders raise."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.start import examine as examining
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.tiny.families import FAMILIES
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import stored
from safetensors.torch import save_file
from step_driver import Driver

from fdasync.engine.config import EngineConfig
from fdasync.errors import CheckpointError, ConfigError
from fdasync.runner.plugins import make_runner

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.runner.report import ModelReport

SOME = (
    "qwen3_moe",
    "longcat_flash",
    "phimoe",
    "llama4",
    "gemma4_text",
    "dbrx",
    "hunyuan_v1_moe",
    "qwen3_moe_fp8",
    "nemotron_h",
    "glm_moe_dsa",
)


def report_of(folder: Path, *, routing: Any = "auto", **runner: Any) -> ModelReport:
    config = EngineConfig(model=str(folder), routing=routing)
    return make_runner("transformers", {"device": "cpu", **runner}, config.runner_limits()).examine()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", SOME)
async def test_a_report_says_what_loading_finds(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    report = report_of(tmp_path, dtype="float32")
    assert (report.served, report.reason) == (True, "")
    driver = await Driver.open(tmp_path, num_blocks=8, config={"self_check": False})
    capacity, model = driver.capacity, driver.runner.opened.model.step_model.model
    assert report.kv_token_nbytes == capacity.block_nbytes // capacity.block_tokens
    assert report.state_nbytes == capacity.snapshot_nbytes
    assert report.aux_token_nbytes == capacity.aux_specs[0].token_nbytes
    assert report.max_context_tokens == capacity.max_context_tokens
    assert (report.moe_layers, report.num_experts) == (len(capacity.moe_layer_ids), capacity.num_experts)
    assert (report.top_k, report.num_hidden_layers) == (capacity.top_k, capacity.num_hidden_layers)
    assert (report.dtype, report.model_class) == (capacity.dtype, type(model).__name__)
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    buffers = sum(tensor.nbytes for name, tensor in model.named_buffers() if name in model.state_dict())
    assert report.weights_nbytes == sum(memory.values()) + buffers
    assert report.stored_nbytes == (tmp_path / SINGLE_FILE).stat().st_size
    # what loading says of names and dtypes, before the notes of steps
    assert capacity.notes[: len(report.notes)] == report.notes
    await driver.close()


FORESEEN: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "qwen3_moe": (
        {
            "decoder layers": 4,
            "rotary embeddings": 4,
            "tables of angles": 1,
            "norms": 17,
            "gates": 1,
            "experts": 3,
            "routers": 3,
        },
        (),
    ),
    "qwen3_next": (
        {
            "decoder layers": 4,
            "rotary embeddings": 1,
            "tables of angles": 1,
            "norms": 11,
            "gates": 4,
            "experts": 4,
            "routers": 4,
            "gated delta nets": 3,
        },
        ("norms of Qwen3NextRMSNormGated are the library's own: it takes more than rows",),
    ),
    "dbrx": (
        {"rotary embeddings": 4, "tables of angles": 1},
        (
            "decoder layers are the library's own: what holds them is of no known kind",
            "experts are the library's own: layer 0 (DbrxExperts) does not take the library's experts interface",
            "routers of layers 0, 1, 2, 3 are the library's own:"
            " DbrxRouter makes logits, and the block around it chooses",
        ),
    ),
}


@pytest.mark.parametrize("family", FORESEEN)
def test_a_report_says_what_kernels_would_replace_and_what_not(tmp_path: Path, family: str) -> None:
    """`checks/operations.py` holds the same search against what is fused."""
    make_tiny_checkpoint(tmp_path, family)
    report = report_of(tmp_path)
    assert (report.replaced, report.kept) == FORESEEN[family]
    chosen = report_of(tmp_path, experts="eager", fused_router=False, fused_layers=False)
    assert chosen.replaced.keys() <= {"gated delta nets"}
    assert report_of(tmp_path, kernels="torch").replaced == {}


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("family", [name for name, entry in FAMILIES.items() if entry.refused])
def test_a_refusal_is_told_without_weights(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    report = report_of(tmp_path)
    assert not report.served
    assert any(word in report.reason for word in FAMILIES[family].refused)


def test_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.setattr(examining.loading, "stream", lambda *_: pytest.fail("tensors were read"))
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    assert report_of(tmp_path).served


def test_a_folder_that_is_not_whole_is_told_by_its_file(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    tensors = stored(tmp_path)
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: model\.norm\.weight"):
        report_of(tmp_path)


def test_drawn_weights_need_a_config_alone(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    (tmp_path / SINGLE_FILE).unlink()
    assert report_of(tmp_path, weights="random").served


async def test_a_report_counts_all_data_of_a_token(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    aux = ["routing_weights", "layer_norms"]
    driver = await Driver.open(tmp_path, num_blocks=8, config={"aux": aux})
    assert report_of(tmp_path, aux=aux).aux_token_nbytes == sum(spec.token_nbytes for spec in driver.capacity.aux_specs)
    await driver.close()


async def test_a_model_whose_routing_cannot_be_recorded_is_served_without(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "jetmoe")
    assert not report_of(tmp_path).served
    report = report_of(tmp_path, routing=False)
    driver = await Driver.open(tmp_path, num_blocks=8, capture=False)
    assert (report.served, report.reason) == (True, "")
    assert report.max_context_tokens == driver.capacity.max_context_tokens
    assert report.kv_token_nbytes == 0
    await driver.close()


def test_data_that_a_dense_model_has_not_are_refused_as_at_the_start(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_dense")
    with pytest.raises(ConfigError, match="has no MoE layers"):
        report_of(tmp_path, routing=True)
    with pytest.raises(ConfigError, match="without captured routing"):
        report_of(tmp_path, aux=["routing_weights"])


async def test_a_dense_model_is_told_to_have_no_routing_at_its_start_too(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_dense")
    note = "no MoE layers: results have no routing"
    assert note in report_of(tmp_path).notes
    assert note not in report_of(tmp_path, routing=False).notes
    driver = await Driver.open(tmp_path, num_blocks=8)
    assert note in driver.capacity.notes
    await driver.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_position_embeddings": 0}, "its config has max_position_embeddings 0"),
        ({"max_position_embeddings": -1}, "its config has max_position_embeddings -1"),
        ({"num_experts_per_tok": 0}, "is handed no expert ids"),
    ],
)
def test_sizes_that_serve_nothing_are_refused(tmp_path: Path, changes: dict[str, int], reason: str) -> None:
    make_tiny_checkpoint(tmp_path, "mixtral")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    report = report_of(tmp_path)
    assert not report.served
    assert reason in report.reason


def test_the_library_warns_of_nothing_that_an_engine_replaces(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "dbrx")
    library, told = logging.getLogger("transformers"), Told()
    library.addHandler(told)
    level = library.level
    try:
        # of this family the library says that it cannot check how attention is computed
        report = report_of(tmp_path)
        assert library.level == level
    finally:
        library.removeHandler(told)
    assert report.served
    assert told.lines == []


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
