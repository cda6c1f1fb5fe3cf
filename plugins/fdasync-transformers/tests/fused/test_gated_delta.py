"""Gated delta nets by few kernels: they compute what the library's code does, and what differs is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_path import DEVICE
from fdasync_transformers.fused.recurrent import flat, gated_delta
from fdasync_transformers.fused.recurrent.flat import FlatSteps
from fdasync_transformers.fused.recurrent.gated_delta import GatedDelta
from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.model.recurrent.probe import find_state
from fdasync_transformers.model.recurrent.steps import RecurrentSteps
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from step_driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def opened(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Mixers' forwards, and the layout of their states."""
    model = make_tiny_model(family).to(dtype).to("cuda" if ON_GPU else "cpu")
    layout = find_state(model)
    assert layout is not None
    return RecurrentSteps(model, layout).forwards, layout


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_known_nets_are_computed_by_few_kernels(family: str, dtype: torch.dtype) -> None:
    forwards, layout = opened(family, dtype)
    steps = FlatSteps(forwards, layout)
    assert {type(one) for one in steps._flat} == {GatedDelta}
    assert steps.notes == ()


@pytest.mark.parametrize("family", ["kimi_linear", "lfm2_moe"])
def test_others_are_the_library_s_code(family: str) -> None:
    forwards, layout = opened(family)
    steps = FlatSteps(forwards, layout)
    assert {type(one) for one in steps._flat} == {flat._FlatForward}
    # nothing else was to be had
    assert steps.notes == ()


def test_a_net_that_computes_something_else_keeps_the_library_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, layout = opened("qwen3_next")
    scale(monkeypatch)
    steps = FlatSteps(forwards, layout)
    assert {type(one) for one in steps._flat} == {flat._FlatForward}
    (note,) = steps.notes
    assert note.startswith("recurrent layers Qwen3NextGatedDeltaNet are the library's own: ")
    assert "gives other results" in note


def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gated delta nets compute something else."""
    plain = GatedDelta.__call__

    def scaled(self: Any, spans: Any, states: Any, hidden: torch.Tensor, others: Any) -> torch.Tensor:
        return plain(self, spans, states, hidden * 1.001, others)

    monkeypatch.setattr(GatedDelta, "__call__", scaled)


async def test_who_starts_an_engine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(
        tmp_path, "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    scale(monkeypatch)
    driver = await Driver.open(tmp_path, config={"self_check": False, "cuda_graphs": False, **DEVICE})
    notes = [note for note in driver.capacity.notes if "GatedDeltaNet" in note]
    await driver.close()
    assert len(notes) == 1
    assert "the library's own" in notes[0]


def test_a_state_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, layout = opened("qwen3_next")
    mixer = forwards[0].mixer
    known = GatedDelta.make(mixer, layout.parts[mixer.name])
    library = flat._FlatForward(mixer, layout.parts[mixer.name])

    def forgetful(spans: Any, states: Any, hidden: torch.Tensor, others: Any) -> torch.Tensor:
        out = library(spans, states, hidden, others)
        states.rows[1][0] = 0
        return out

    assert known is not None
    with torch.inference_mode():
        gated_delta.check_net(library, layout, known)
        with pytest.raises(Differs, match="gives other results"):
            gated_delta.check_net(forgetful, layout, known)


def test_a_net_that_is_built_otherwise_is_not_known() -> None:
    forwards, layout = opened("qwen3_next")
    mixer = forwards[0].mixer
    mixer.module.norm.activation = "gelu"
    assert GatedDelta.make(mixer, layout.parts[mixer.name]) is None
    (note,) = FlatSteps(forwards[:1], layout).notes
    assert "built otherwise" in note
