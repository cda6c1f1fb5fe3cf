"""Models by their names on the Hugging Face hub: looked up in its cache, never downloaded unasked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fdasync_transformers.model.checkpoint_folder import checkpoint_folder
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from huggingface_hub import constants

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with the snapshot of one model, org/tiny."""
    folder = tmp_path / "hub"
    snapshot = folder / "models--org--tiny" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (folder / "models--org--tiny" / "refs").mkdir()
    (folder / "models--org--tiny" / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return snapshot


async def test_an_engine_takes_a_name_of_the_hub_whose_snapshot_is_there(cache: Path) -> None:
    make_tiny_checkpoint(cache, "qwen3_moe")
    runner = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    config = EngineConfig(
        model="org/tiny", tokenizer="none", process="inline", num_blocks=8, max_context_tokens=32, runner_config=runner
    )
    async with Engine(config) as engine:
        assert engine.config.model == engine.facts().model_path == str(cache)
        assert len((await engine.complete([3, 5], SamplingParams(max_tokens=2))).token_ids) == 2


def test_a_name_that_is_not_there_is_told_what_to_type(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/other: no folder here, .*hub\).*`hf download org/other`"):
        Engine(EngineConfig(model="org/other"))


@pytest.mark.parametrize("model", ["tiny", "a/b/c", "./org", "~/org", "/org", "org/", ""])
def test_what_is_no_name_of_the_hub_stays(cache: Path, model: str) -> None:
    assert checkpoint_folder(model) == model


def test_a_folder_goes_before_a_name(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("org/tiny") == "org/tiny"


def test_a_download_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing listens there
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="org/other: the hub cannot be reached: "):
        checkpoint_folder("org/other", download=True)
