"""The benchmark of a trainer's step: a small run of it, and that both sides compute the same step."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.trainer import trainer_step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

SHAPE: dict[str, Any] = {
    **trainer_step.SHAPES["small"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
}


def test_both_sides_take_the_same_step() -> None:
    default, fixed = trainer_step.sides(SHAPE, 2, 16, torch.device("cpu"))
    assert default._given["attention_mask"].sum(1).tolist() == [12, 16]
    found = []
    for side in (default, fixed):
        with side._context:
            logits = side._model(**side._given).logits[:, :-1]
            found.append(side._logprobs(logits).detach())
    # a padded row's targets count on neither side
    assert [int((one != 0).sum()) for one in found] == [11 + 15] * 2
    assert torch.allclose(found[0], found[1], atol=0.05)
    assert all(side.seconds(backward=True) > 0 for side in (default, fixed))


def test_a_small_run_writes_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer_step.SHAPES, "small", SHAPE)
    out = tmp_path / "figures.json"
    words = ["trainer_step", "--rows", "2", "--width", "8", "--pairs", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    trainer_step.main()
    figures = json.loads(out.read_text())["figures"]
    for what in ("step", "forward"):
        ratio = figures[f"{what}_ms_fixed"] / figures[f"{what}_ms_default"]
        assert figures[f"{what}_fixed_over_default"] == pytest.approx(ratio, rel=1e-3)
