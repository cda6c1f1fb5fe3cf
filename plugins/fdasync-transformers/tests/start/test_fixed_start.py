"""Fixed numerics at the start of a runner: what is refused, what is proven, and what they are named by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.fixed import mode
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    return tmp_path


def opened(folder: Path, numerics: Any, **config: Any) -> Any:
    return Driver.open(folder, config={"device": "cpu", **config}, numerics=numerics)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("experts", "grouped_mm"),
        ("experts", "batched_mm"),
        ("experts", "fused"),
        ("kernels", "triton"),
        ("self_check", False),
        ("dtype", "float64"),
    ],
)
async def test_settings_without_fixed_numerics_are_refused_by_name(folder: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        await opened(folder, "fixed", **{key: value})
    assert caught.value.field == f"runner_config.{key}"


@pytest.mark.ci
@pytest.mark.parametrize("experts", ["auto", "eager"])
async def test_what_holds_is_said(folder: Path, experts: str) -> None:
    driver = await opened(folder, "fixed", experts=experts)
    assert driver.capacity.numerics == "fixed"
    assert "experts: eager" in driver.capacity.notes
    (note,) = [one for one in driver.capacity.notes if one.startswith("fixed numerics:")]
    assert note.endswith("have the same bits alone and in a mixed batch")
    await driver.close()
    other = await opened(folder, "default")
    assert other.capacity.numerics == "default"
    # another device or version has other bits, so their names count
    assert other.capacity.fingerprint != driver.capacity.fingerprint
    assert other.capacity.weights_id == driver.capacity.weights_id
    await other.close()


async def test_a_library_whose_bits_change_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mode._HANDLERS, torch.ops.aten.mm.default, torch.ops.aten.mm.default)
    with pytest.raises(UnsupportedModel, match=r"does not hold for it here: logits of \d+ of \d+ tokens"):
        await opened(folder, "fixed")


@pytest.mark.parametrize("numerics", ["default", "fixed"])
def test_a_report_says_what_would_be_promised(folder: Path, numerics: Any) -> None:
    limits = RunnerLimits(model=str(folder), max_running=4, max_step_tokens=64, numerics=numerics)
    assert TransformersRunner(TransformersConfig(device="cpu"), limits).examine().numerics == numerics
