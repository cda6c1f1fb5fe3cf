"""What models with recurrent layers are refused with, and mixers whose forms are not one function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.fused.recurrent.flat import find_missing
from fdasync_transformers.model.kept.forms import FP8
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.model.kept.linears import KeptLinear, keep_linears, kept_weight, linears_of, make_plain
from fdasync_transformers.model.recurrent import steps
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.model.recurrent.probe import find_state, refuse_forgetful
from fdasync_transformers.model.refusals import refuse_unservable
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from step_driver import Driver

from fdasync.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("sum_slices", {"sum_slices": 2, "numerics": "fixed"}),
        ("numerics", {"numerics": "fixed"}),
    ],
)
async def test_what_is_not_done_is_refused_by_its_field(
    tmp_path: Path, field: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, **values)
    assert caught.value.field == field
    assert "recurrent layers so far, such as lfm2_moe" in str(caught.value)


@pytest.mark.parametrize(("family", "mixer"), [("zaya", "ZayaCCA"), ("minimax", "MiniMaxLightningAttention")])
async def test_a_recurrence_without_a_kernel_is_refused_on_gpus(
    tmp_path: Path, family: str, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_tiny_checkpoint(tmp_path, family)
    with pytest.raises(ConfigError, match=rf"no kernel knows the recurrence of .*{mixer}") as caught:
        await Driver.open(tmp_path, config={"kernels": "triton"})
    assert caught.value.field == "runner_config.device"


async def test_an_activation_that_no_kernel_has_is_refused_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_tiny_checkpoint(tmp_path, "qwen3_next", hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"no kernel knows the activation 'gelu' of .*Qwen3NextGatedDelta") as caught:
        await Driver.open(tmp_path, config={"kernels": "triton"})
    assert caught.value.field == "runner_config.device"
    assert not find_missing(make_tiny_model("qwen3_next", hidden_act="swish"))


def test_state_that_a_method_beside_the_forward_keeps_is_found() -> None:
    model = make_tiny_model("qwen4_exp_text", ple_layer_ids=[1], heads_per_ngram=2, ngram_vocab_size_base=64)
    kinds = {type(mixer.module).__name__ for mixer in find_mixers(model)}
    assert kinds == {"Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer", "Qwen4ExpTextNGramEmbedding"}
    with pytest.raises(UnsupportedModel) as caught:
        refuse_unservable(model)
    for reason in (
        r"PLELayer\) keeps state, and takes input_ids",
        r"NGramEmbedding\) keeps state, and takes input_ids",
    ):
        assert re.search(reason, str(caught.value))


def causal_conv1d_fn(states: torch.Tensor, activation: str | None = None) -> torch.Tensor:
    """By the library's name, for the text of what follows."""
    del activation
    return states


class KeepsBeside(torch.nn.Module):
    """As a mixer of no library does that is known: its kernel is known, and one more state is kept elsewhere."""

    layer_idx = 0
    activation = None

    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        cache_params.update_conv_state(hidden_states, self.layer_idx)
        return self.keep(causal_conv1d_fn(hidden_states, activation=self.activation), cache_params)

    def keep(self, states: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.update_recurrent_state(states, self.layer_idx)
        return states


class NamesNoCache(KeepsBeside):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden_states


def test_state_of_which_the_forward_tells_nothing_has_no_kernel_and_no_place() -> None:
    assert find_missing(torch.nn.Sequential(KeepsBeside())) == "the recurrence of 0 (KeepsBeside)"
    with pytest.raises(UnsupportedModel, match="its forward names neither the cache nor a layer"):
        find_mixers(torch.nn.Sequential(NamesNoCache()))


async def test_a_scan_without_a_state_is_named(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "jamba")
    with pytest.raises(UnsupportedModel, match=r"JambaMambaMixer.*the library's scan takes none"):
        await Driver.open(tmp_path)


def test_a_scan_without_a_state_is_found_by_what_it_computes() -> None:
    with pytest.raises(UnsupportedModel, match=r"several tokens of model.layers.0.mamba"):
        refuse_forgetful(make_tiny_model("jamba"))


def test_linear_layers_that_are_kept_as_stored_are_tried_too() -> None:
    model = make_tiny_model("qwen3_next").to(torch.bfloat16).requires_grad_(False)
    paths = [path for path, _ in linears_of(model) if "linear_attn" in path]
    plain = {path: model.get_submodule(path).weight.clone() for path in paths}
    keep_linears(model, paths)
    for path, weight in plain.items():
        kept, made = kept_weight(model.get_submodule(path)), Kept.made_of(weight, FP8)
        kept.values.copy_(made.values)
        kept.scales.copy_(made.scales)
    refuse_forgetful(model, make_plain)
    # a copy was dequantised, and not the model
    assert all(isinstance(model.get_submodule(path), KeptLinear) for path in paths)


def test_the_single_token_form_has_the_bounds_of_the_chunk_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("nemotron_h", time_step_min=0.5)
    refuse_forgetful(model)
    monkeypatch.setattr(steps, "bounded_forward", lambda _: None)
    with pytest.raises(UnsupportedModel, match=r"a token of model.layers.0.mixer"):
        refuse_forgetful(model)


def test_states_of_all_kinds_are_found() -> None:
    found = {}
    for family in ("qwen3_next", "lfm2_moe", "minimax", "zaya"):
        layout = find_state(make_tiny_model(family))
        assert layout is not None
        found[family] = [(spec.name, spec.shape, spec.layers) for spec in layout.specs]
    assert found == {
        "qwen3_next": [("convolution", (64, 4), (0, 1, 2)), ("recurrent-by-value", (4, 8, 8), (0, 1, 2))],
        "lfm2_moe": [("convolution", (32, 3), (0, 2))],
        "minimax": [("recurrent", (4, 8, 8), (0, 2))],
        "zaya": [("convolution", (48, 2), (0, 1, 2, 3)), ("recurrent", (8,), (0, 1, 2, 3))],
    }
    assert find_state(make_tiny_model("qwen3_moe")) is None


async def test_memory_is_parted_among_states_snapshots_and_blocks(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    limits: dict[str, Any] = {"num_blocks": None, "max_running": 4, "max_context_tokens": 256}
    # a state has 768 bytes, a block 4 * 256
    config = {"kv_cache_nbytes": 4 * 768 + 2 * 40 * 1024, "self_check": False}
    driver = await Driver.open(tmp_path, config=config, **limits)
    assert (driver.capacity.snapshot_nbytes, driver.capacity.num_blocks, driver.capacity.num_snapshots) == (768, 40, 40)
    await driver.close()
    driver = await Driver.open(tmp_path, config=config, num_snapshots=20, **limits)
    assert (driver.capacity.num_blocks, driver.capacity.num_snapshots) == (65, 20)
    await driver.close()
    with pytest.raises(ConfigError, match=r"beside 15360 bytes of recurrent state"):
        await Driver.open(tmp_path, config={**config, "kv_cache_nbytes": 16_000}, **limits)
