"""Settings of torch that give other bits: refused by a rollout's start and by each pass of a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_trainer import fixed_numerics
from fdasync_transformers import TransformersConfig
from fdasync_transformers.fixed.refusals import refuse_settings
from fdasync_transformers.start.runner_config import check_numerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model

from fdasync.errors import BadInput, ConfigError
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONEDNN = torch.backends.mkldnn
PRECISION = "torch.backends.mkldnn.matmul.fp32_precision"
IDS = torch.arange(3, 9)[None]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    ONEDNN.matmul.fp32_precision = "none"
    ONEDNN.enabled = True


def precision(value: str) -> None:
    ONEDNN.matmul.fp32_precision = value


def for_all(value: str) -> None:
    torch.backends.fp32_precision = value


def without_onednn(_: str) -> None:
    ONEDNN.enabled = False


@pytest.mark.parametrize(
    ("change", "value", "name"),
    [
        (torch.set_float32_matmul_precision, "medium", PRECISION),
        (torch.set_float32_matmul_precision, "high", PRECISION),
        (precision, "bf16", PRECISION),
        (precision, "tf32", PRECISION),
        (for_all, "bf16", PRECISION),
        (without_onednn, "", "torch.backends.mkldnn.enabled"),
    ],
)
def test_both_sides_refuse_what_changes_bits(change: Callable[[str], None], value: str, name: str) -> None:
    model = make_tiny_model("qwen3_dense")
    limits = RunnerLimits(model="", max_running=1, max_step_tokens=8, numerics="fixed")
    with fixed_numerics(model):
        model(input_ids=IDS)
        change(value)
        for part in (model, model.model):
            with pytest.raises(BadInput, match="numerics are not the fixed ones") as caught:
                part(input_ids=IDS)
            assert caught.value.field == name
            assert caught.value.limit in ("ieee", True)
    with pytest.raises(BadInput, match=name.replace(".", r"\.")), fixed_numerics(model):
        pass
    with pytest.raises(ConfigError) as refused:
        check_numerics(TransformersConfig(), limits, CPU)
    assert refused.value.field == name
    check_numerics(TransformersConfig(), RunnerLimits(model="", max_running=1, max_step_tokens=8), CPU)


@pytest.mark.parametrize("change", [None, torch.set_float32_matmul_precision, precision, for_all])
def test_whole_products_by_any_name_pass(change: Callable[[str], None] | None) -> None:
    if change is not None:
        change("highest" if change is torch.set_float32_matmul_precision else "ieee")
    refuse_settings(CPU)


def test_one_setting_makes_all_of_it_whole_again() -> None:
    """As the error's hint says."""
    for_all("bf16")
    precision("bf16")
    with pytest.raises(BadInput, match='"highest"'):
        refuse_settings(CPU)
    torch.set_float32_matmul_precision("highest")
    refuse_settings(CPU)


@pytest.mark.parametrize("way", ["old", "new"])
def test_tf32_on_a_gpu_changes_what_kernels_are_compared_with(way: str) -> None:
    products: Any = torch.backends.cuda.matmul
    try:
        refuse_settings(CUDA)
        if way == "old":
            products.allow_tf32 = True
        else:
            products.fp32_precision = "tf32"
        with pytest.raises(ConfigError, match=r"cuda\.matmul\.fp32_precision: is 'tf32'"):
            refuse_settings(CUDA, ConfigError)
        refuse_settings(CPU)
    finally:
        products.fp32_precision = "ieee"
    refuse_settings(CUDA)


def test_sums_of_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(fp32_precision="none", allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", found)
    with pytest.raises(BadInput, match="allow_fp16_accumulation: is True"):
        refuse_settings(CUDA)
