"""Gated delta nets by few kernels: they compute what the library's code does, and what differs is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_transformers.fused.recurrent import flat, gated_delta
from fdasync_transformers.fused.recurrent.flat import FlatSteps
from fdasync_transformers.fused.recurrent.gated_delta import GatedDelta
from fdasync_transformers.model.recurrent.probe import find_state
from fdasync_transformers.model.recurrent.steps import RecurrentSteps
from fdasync_transformers.tiny.checkpoints import make_tiny_model

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_known_nets_are_computed_by_few_kernels(family: str, dtype: torch.dtype) -> None:
    forwards, layout = opened(family, dtype)
    assert {type(one) for one in FlatSteps(forwards, layout)._flat} == {GatedDelta}


@pytest.mark.parametrize("family", ["kimi_linear", "lfm2_moe"])
def test_others_are_the_library_s_code(family: str) -> None:
    forwards, layout = opened(family)
    assert {type(one) for one in FlatSteps(forwards, layout)._flat} == {flat._FlatForward}


def test_a_net_that_computes_something_else_keeps_the_library_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, layout = opened("qwen3_next")
    plain = GatedDelta.__call__

    def scaled(self: Any, spans: Any, states: Any, hidden: torch.Tensor, others: Any) -> torch.Tensor:
        return plain(self, spans, states, hidden * 1.001, others)

    monkeypatch.setattr(GatedDelta, "__call__", scaled)
    assert {type(one) for one in FlatSteps(forwards, layout)._flat} == {flat._FlatForward}


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
    assert gated_delta.difference(known, library, layout) == ""
    assert "relative error" in gated_delta.difference(known, forgetful, layout)


def test_a_net_that_is_built_otherwise_is_not_known() -> None:
    forwards, layout = opened("qwen3_next")
    mixer = forwards[0].mixer
    mixer.module.activation = "gelu"
    assert GatedDelta.make(mixer, layout.parts[mixer.name]) is None
