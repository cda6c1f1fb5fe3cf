"""The benchmark of exactness: a rehearsal in Triton's interpreter, and its judges find what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers import make_random_checkpoint

from benchmarks.gpu import exact as gpu_exact
from benchmarks.gpu import plays
from benchmarks.gpu.half import HalfJudge
from benchmarks.gpu.judge import Answer, Judge
from benchmarks.lib.parts import Parts
from benchmarks.lib.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.ci

CPU = torch.device("cpu")
RUNNER = {"device": "cpu", "kernels": "torch", "num_threads": 1, "self_check": False}


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: runners of this process and references compute on the benchmark's own loop."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # a rehearsal sets it
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def play(folder: Path, family: str, dtype: str = "float32", std: float = 0.3) -> plays.Play:
    first, other = (
        make_random_checkpoint(folder / name, family, seed=seed, size="tiny", std=std)
        for seed, name in enumerate(("first", "other"))
    )
    return plays.Play(plays.SCALES["tiny"], first, other, folder, {**RUNNER, "dtype": dtype})


def folders(one: plays.Play) -> dict[str, Path]:
    return {"first": one.folder, "other": one.other}


def damaged(answer: Answer, change: Callable[[Any], Any]) -> Answer:
    """The same with `change` applied to a copy of its rows."""
    routing = answer.routing
    rows = change(routing.array.copy())
    fields = {"start": routing.start, "layer_ids": routing.layer_ids, "num_experts": routing.num_experts}
    return replace(answer, routing=SimpleNamespace(array=rows, **fields))


@pytest.mark.nightly
def test_a_rehearsal_writes_what_it_found(tmp_path: Path) -> None:
    """The path of GPUs, by kernels in the interpreter; every row and token of the play is right."""
    out = tmp_path / "figures.json"
    assert gpu_exact.main(["--tiny", "--parts", "tight", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    figures = report["figures"]
    assert figures["wrong_rows"] == figures["wrong_tokens"] == figures["missing_rows"] == 0
    assert figures["exact_rows"] > 50
    assert figures["exact_tokens"] > 10
    assert figures["tied_rows"] == figures["tied_tokens"] == 0
    assert report["conditions"]["failed"] == {}
    part = report["conditions"]["parts"]["qwen3_moe tight"]
    assert min(part["preemptions"], part["hit_tokens_host"], part["swapped_in_blocks"]) > 0


def test_a_wrong_row_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = plays.tight

    async def dishonest(one: plays.Play, **values: Any) -> plays.Played:
        played = await honest(one, **values)
        played.answers[0] = damaged(played.answers[0], lambda rows: np.roll(rows, 1, axis=0))
        return played

    monkeypatch.setattr(plays, "tight", dishonest)
    out = tmp_path / "figures.json"
    arguments = ["--tiny", "--kernels", "torch", "--families", "glm4_moe", "--parts", "tight,bf16_tight"]
    assert gpu_exact.main([*arguments, "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["figures"]["wrong_rows"] > 0
    assert report["figures"]["bf16_wrong_rows"] > 0
    assert set(report["conditions"]["failed"]) == {"glm4_moe tight", "glm4_moe bf16_tight"}


async def test_new_weights_in_the_middle_are_judged_by_both(tmp_path: Path) -> None:
    """All right as it is; one wrong row on either side of the turn is found, and so are other weights."""
    one = play(tmp_path, "ernie4_5_moe")
    answers = (await plays.updated(one, process="inline")).answers
    judge = Judge(folders(one), {0: "first", 1: "other", 2: "first"}, CPU, torch.float32)
    found = judge.judge(answers)
    assert found.wrong == 0
    assert found.counts["exact_rows"] > 100
    kept = next(answer for answer in answers if len(answer.spans) == 2)

    def swap(at: int) -> Answer:
        def change(rows: Any) -> Any:
            absent = next(expert for expert in range(8) if expert not in rows[at, 0])
            rows[at, 0, 0] = absent
            return rows

        return damaged(kept, change)

    assert judge.judge([kept]).wrong == 0
    for at in (1, len(kept.prompt) - 1 + kept.spans[0][1], len(kept.routing.array) - 1):
        assert judge.judge([swap(at)]).counts["wrong_rows"] >= 1
    swapped = Judge(folders(one), {0: "other", 1: "first", 2: "other"}, CPU, torch.float32)
    assert swapped.judge([kept]).counts["wrong_rows"] > 2
    lacking = damaged(kept, lambda rows: rows[:-1])
    assert judge.judge([lacking]).counts["missing_rows"] == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe", "glm4_moe"])
async def test_half_precision_has_ties_and_no_more(tmp_path: Path, family: str) -> None:
    one = play(tmp_path, family, "bfloat16", 0.1)
    answers = (await plays.tight(one, process="inline")).answers
    judge = HalfJudge(folders(one), {0: "first"}, CPU, torch.bfloat16)
    judge.calibrate()
    # a hundredth of a spread and more is rounded away, and not half of it
    assert 0.005 < max(judge.tolerance.values()) < 0.5
    found = judge.judge(answers)
    assert found.wrong == 0
    assert found.counts["exact_rows"] > 0.8 * (found.counts["exact_rows"] + found.counts["tied_rows"])
    # rows of the position before, and a row that names an expert twice
    moved = damaged(answers[0], lambda rows: np.roll(rows, 1, axis=0))
    assert judge.judge([moved]).counts["wrong_rows"] > 0.2 * moved.routing.array.shape[0]
    twice = damaged(answers[0], lambda rows: np.concatenate([rows[:, :, :1], rows[:, :, :1]], axis=2))
    assert judge.judge([twice]).counts["exact_rows"] == 0
    lacking = damaged(answers[0], lambda rows: rows[1:])
    assert judge.judge([lacking]).counts["missing_rows"] == rows_of_layers(lacking)
    other = replace(answers[0], greedy=True, tokens=tuple((token + 1) % 250 for token in answers[0].tokens))
    assert judge.judge([other]).counts["wrong_tokens"] > 0


def rows_of_layers(answer: Answer) -> int:
    return len(answer.routing.layer_ids)


async def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    report = Report("parts")
    parts = Parts(report, str(path))

    async def void() -> None:
        plays.demand(SimpleNamespace(preemptions=0, steps=9), preemptions=1, steps=1)

    async def good() -> str:
        report.figures["kept"] = 1.0
        return "done"

    assert await parts.run("good", good) == "done"
    assert await parts.run("void", void) is None
    assert json.loads(path.read_text())["figures"] == {"kept": 1.0}
    problem = "Void: nothing was tested where these are too small: {'preemptions': 0}"
    assert json.loads(path.read_text())["conditions"]["failed"] == {"void": problem}
    assert parts.finish() == 1
