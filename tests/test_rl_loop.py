"""The example of a whole RL loop: its parts, and one short run of it as users start it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdasync.mismatch import mismatch
from fdasync.result import CachedTokens, Routing, Sample, WeightSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parent.parent / "examples"
PRETRAIN_STEPS = 25  # fewer, and the experts that differ move no log-prob


@pytest.fixture(scope="module")
def rl() -> Iterator[Any]:
    """The example as a module; it finds `small_moe` beside it, as it does when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield import_module("rl_loop")


@pytest.fixture(scope="module")
def model(rl: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl") / "model"
    assert rl.small_moe.pretrain(folder, steps=PRETRAIN_STEPS, say=[].append) == folder
    return folder


def made_sample(tokens: tuple[int, ...], spans: tuple[tuple[int, int, int], ...], **values: Any) -> Sample:
    return Sample(
        index=0,
        token_ids=tokens,
        text="",
        finish_reason="stop",
        processed_logprobs=None,
        top_logprobs=None,
        cached=CachedTokens(),
        weight_version=tuple(WeightSpan(*span) for span in spans),
        aux={},
        **{"raw_logprobs": np.full(len(tokens), -1.0, np.float32), "routing": None, **values},
    )


def test_a_problem_has_one_right_answer(rl: Any) -> None:
    moe = rl.small_moe
    asked = moe.problems(50, seed=3)
    assert asked == moe.problems(50, seed=3)
    assert asked != moe.problems(50, seed=4)
    lengths = {len(problem.answer) for problem in asked}
    assert lengths == set(range(moe.SHORTEST + 1, moe.MAX_NEW_TOKENS + 1))
    assert len({len(problem.answer) for problem in asked[:9]}) == 9  # as many of each length
    for problem in asked:
        question, answer = moe.text(problem.prompt), moe.text(problem.answer)
        assert answer == "".join(sorted(question[:-1])) + ";"
        assert question.endswith(">")
        assert moe.reward(problem, list(problem.answer)) == 1.0
        assert moe.reward(problem, problem.answer[:-1]) == 0.0  # without its end
        assert moe.reward(problem, (*problem.answer, moe.END)) == 0.0
        assert moe.reward(problem, (problem.answer[0] + 1, *problem.answer[1:])) == 0.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_are_centred_and_scaled(rl: Any, rewards: list[float]) -> None:
    made = rl.advantages(rewards)
    assert math.isclose(sum(made), 0, abs_tol=1e-6)
    spread = float(np.std(rewards))
    assert math.isclose(float(np.std(made)), spread / (spread + 1e-6), abs_tol=1e-9)
    order = np.argsort(rewards, kind="stable")
    assert all(np.diff(np.array(made)[order]) >= 0)


def test_a_group_of_equal_rewards_teaches_nothing(rl: Any) -> None:
    assert rl.advantages([1.0] * 8) == [0.0] * 8
    assert rl.advantages([1.0, 0.0]) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_figures_tell_samples_that_crossed_an_update(rl: Any) -> None:
    spans = [((0, 3, 4),), ((0, 2, 3), (2, 3, 4)), ((0, 3, 2),)]
    batch = [rl.Experience((5, 2), made_sample((5, 6, 7), own), 1.0, 0.0) for own in spans]
    trainer = [np.full(3, value, np.float32) for value in (-1.5, -3.0, -5.0)]
    told = rl.figures(batch, trainer, version=4, clipped=0.0, rollout_s=1.0, train_s=1.0)
    assert (told.crossed, told.stale, told.reward) == (1, 2 + 3, 1.0)
    # the KL is of what ran under the trainer's weights alone
    assert told.fresh == mismatch([np.full(3, -1.0)], [np.full(3, -1.5)])


@pytest.mark.parametrize("replay", [False, True])
def test_what_was_rewarded_becomes_likelier(rl: Any, model: Path, replay: bool, monkeypatch: Any) -> None:
    """Two samples of different lengths, in micro-batches of one: their log-probs go where their advantages say."""
    trainer = rl.Trainer(model, replay=replay)
    rng = np.random.default_rng(5)
    batch = []
    for letters, advantage in ((7, 1.0), (9, -1.0)):
        prompt, tokens = (*range(3, 3 + letters), rl.small_moe.ASK), tuple(range(4, 4 + letters))
        rows = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (len(prompt) + letters - 1, 4, 1)), axis=-1)
        routing = Routing(array=rows[..., :4].copy(), start=0, layer_ids=(0, 1, 2, 3), num_experts=16)
        sample = made_sample(tokens, ((0, letters, 0),), routing=routing, raw_logprobs=np.zeros(letters, np.float32))
        batch.append(rl.Experience(prompt, sample, 0.0, advantage))
    with torch.no_grad():
        whole = trainer._forward(batch)
    # a ratio of 1, as if the rollout had computed what the trainer does
    for at, one in enumerate(batch):
        one.sample.raw_logprobs[:] = whole[0][at][whole[3][at]].numpy()
    monkeypatch.setattr(rl, "MICRO_BATCH", 1)
    before, clipped = asyncio.run(trainer.update(batch))
    assert clipped == 0
    after, _ = asyncio.run(trainer.update(batch))
    for at, one in enumerate(batch):
        assert before[at] == pytest.approx(one.sample.raw_logprobs, abs=1e-4)
    assert after[0].mean() > before[0].mean()
    assert after[1].mean() < before[1].mean()


def test_a_model_is_trained_once(rl: Any, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    told: list[str] = []
    monkeypatch.setattr(rl.small_moe, "accuracy", lambda *_: 0.0)  # takes seconds
    file = model / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert rl.small_moe.pretrain(model, steps=PRETRAIN_STEPS, say=told.append) == model
    assert not told
    assert file.stat().st_mtime_ns == before
    again = rl.small_moe.pretrain(tmp_path / "model", steps=PRETRAIN_STEPS, say=told.append)
    assert (again / "model.safetensors").read_bytes() == file.read_bytes()
    assert told
    rl.small_moe.pretrain(again, steps=1, say=told.append)  # other arguments, another model in its place
    assert (again / "model.safetensors").read_bytes() != file.read_bytes()
    (tmp_path / "else").write_text("mine")
    with pytest.raises(FileExistsError):
        rl.small_moe.pretrain(tmp_path, steps=1, say=told.append)


def started(model: Path, cwd: Path, *more: str) -> subprocess.Popen[str]:
    options = ["--folder", str(model), "--pretrain-steps", str(PRETRAIN_STEPS), "--problems", "12", *more]
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "rl_loop.py"), *options],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_short_run_ends_with_a_picture_and_tables(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "2", "--png", "out/loop.png")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert (tmp_path / "out" / "loop.png").read_bytes().startswith(b"\x89PNG")
    for name in ("off", "on"):
        assert len(re.findall(rf"^replay {name}: [12] ", out, re.MULTILINE)) == 2
    # of the tables at the end: samples that crossed an update, and the KL
    crossed = re.findall(r"replay (?:off|on) +│.*│ +([\d,]+) samples", out)
    assert len(crossed) == 2
    assert all(int(one) > 0 for one in crossed), out
    kl = dict(re.findall(r"│ (replay off|replay on) +│ +[\d,]+ │ ([\d.e+-]+) │", out))
    assert 0 < float(kl["replay on"]) <= float(kl["replay off"]), out


def test_an_interrupt_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "500", "--arm", "on")
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("replay on: 1 "):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest
    with pytest.raises(ProcessLookupError):  # its worker has ended too
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())
