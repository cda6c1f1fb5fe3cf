"""The example of a whole RL loop: its parts, and one short run of it as users start it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_trainer.rows.mismatch import mismatch
from hypothesis import given
from hypothesis import strategies as st

from fdasync.result import CachedTokens, Result, Routing, Sample, WeightSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"
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
        processed_logprobs=None,
        top_logprobs=None,
        cached=CachedTokens(),
        weight_version=tuple(WeightSpan(start, stop, str(version)) for start, stop, version in spans),
        aux={},
        **{"raw_logprobs": np.full(len(tokens), -1.0, np.float32), "routing": None, "finish_reason": "stop", **values},
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


def test_a_group_is_scored_sample_by_sample(rl: Any) -> None:
    problem = rl.small_moe.problems(1, seed=0)[0]
    wrong = (*problem.answer[:-1], problem.answer[0])
    made = [
        made_sample(problem.answer, ()),
        made_sample(wrong, (), finish_reason="length"),
        made_sample(wrong, ()),
        made_sample(wrong[:1], (), finish_reason="deadline"),
        made_sample((), (), finish_reason="abort"),
        made_sample(wrong, ()),
    ]
    got = rl.scored(problem, Result(request_id="a", prompt_token_ids=problem.prompt, samples=tuple(made)))
    # those that were cut short are no wrong answers: neither there nor in the group's mean
    assert [one.sample for one in got] == [made[0], made[1], made[2], made[5]]
    assert all(one.prompt == problem.prompt for one in got)
    assert [one.reward for one in got] == [1.0, 0.0, 0.0, 0.0]
    right, others = 0.75 / math.sqrt(3 / 16), -0.25 / math.sqrt(3 / 16)
    assert [one.advantage for one in got] == pytest.approx([right, others, others, others], abs=1e-4)
    assert rl.scored(problem, Result(request_id="a", prompt_token_ids=(), samples=(made[3], made[4]))) == []


@pytest.mark.parametrize(
    ("ratio", "gain", "objective", "cut"),
    [
        (1.0, 2.0, 2.0, False),
        (1.0, -2.0, -2.0, False),
        (1.2, 1.0, 1.2, False),
        (1.5, 1.0, 1.28, True),  # it has risen enough
        (1.5, -1.0, -1.5, False),  # it has risen where it should fall: all of it counts
        (0.9, -1.0, -0.9, False),
        (0.5, -1.0, -0.8, True),  # it has fallen enough
        (0.5, 1.0, 0.5, False),
        (3.0, 0.0, 0.0, False),
    ],
)
def test_the_clip_takes_only_what_has_gone_far_enough(
    rl: Any, ratio: float, gain: float, objective: float, cut: bool
) -> None:
    at = torch.tensor([ratio], requires_grad=True)
    got, was_cut = rl.clipped_objective(at, torch.tensor([gain]))
    assert (float(got.detach()), bool(was_cut)) == (pytest.approx(objective), cut)
    torch.autograd.backward(got.sum())
    assert float(at.grad) == (0.0 if cut else gain)


def made_batch(rl: Any, shapes: tuple[tuple[int, int, float], ...]) -> list[Any]:
    """Samples of (letters, tokens, advantage), with random rows and log-probs."""
    rng = np.random.default_rng(5)
    batch = []
    for letters, count, advantage in shapes:
        prompt = (*rng.integers(3, 19, letters).tolist(), rl.small_moe.ASK)
        tokens = tuple(rng.integers(3, 19, count).tolist())
        rows = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (len(prompt) + count - 1, 4, 1)), axis=-1)
        routing = Routing(array=rows[..., :4].copy(), start=0, layer_ids=(0, 1, 2, 3), num_experts=16)
        theirs = -rng.random(count).astype(np.float32)
        sample = made_sample(tokens, ((0, count, 0),), routing=routing, raw_logprobs=theirs)
        batch.append(rl.Experience(prompt, sample, 0.0, advantage))
    return batch


@pytest.mark.nightly
@pytest.mark.parametrize("replay", [False, True])
def test_log_probs_are_those_of_one_token_after_the_other(rl: Any, model: Path, replay: bool) -> None:
    trainer = rl.Trainer(model, replay=replay)
    batch = made_batch(rl, ((6, 5, 1.0), (9, 11, -0.5), (7, 1, 0.25)))
    trainer.replayed_tokens = 0
    with torch.no_grad():
        mine, theirs, gain, mask = trainer._forward(batch)
    assert mine.shape == theirs.shape == mask.shape == (3, 10 + 11 - 1)
    # every token of a sample but the last has a row
    assert trainer.replayed_tokens == (sum(len(one.sample.routing.array) for one in batch) if replay else 0)
    for at, one in enumerate(batch):
        # place j tells of token j + 1
        first = len(one.prompt) - 1
        wanted = range(first, first + len(one.sample.token_ids))
        assert mask[at].nonzero()[:, 0].tolist() == list(wanted)
        assert float(gain[at, 0]) == one.advantage
        for step, token in enumerate(one.sample.token_ids):
            so_far = one.prompt + one.sample.token_ids[:step]
            rows = one.sample.routing
            rows = Routing(array=rows.array[: len(so_far)], start=0, layer_ids=(0, 1, 2, 3), num_experts=16)
            with torch.no_grad(), rl.replay_routing(trainer.model, [rows]) if replay else nullcontext():
                logits = trainer.model(input_ids=torch.tensor([so_far]), use_cache=False).logits[0, -1].double()
            alone = float(logits[token] - logits.logsumexp(0))
            assert float(mine[at, first + step]) == pytest.approx(alone, abs=1e-4)
            assert float(theirs[at, first + step]) == float(one.sample.raw_logprobs[step])


@pytest.mark.nightly
def test_a_sample_without_its_experts_is_not_trained_on(rl: Any, model: Path) -> None:
    sample = made_sample((5, 6), ((0, 2, 0),))
    trainer = rl.Trainer(model, replay=True)
    with pytest.raises(RuntimeError, match="without its experts"):
        asyncio.run(trainer.update([rl.Experience((5, 2), sample, 1.0, 1.0)]))
    with pytest.raises(RuntimeError, match="nothing to train on"):
        asyncio.run(trainer.update([]))


class SteppingEngine:
    """Takes a step at each turn of the loop unless it is paused; request k ends after k + 3 of them."""

    latest: SteppingEngine

    def __init__(self, config: Any) -> None:
        type(self).latest = self
        self.steps = self.version = self.running = self.asked = 0
        self.log: list[str] = []
        self._goes = asyncio.Event()
        self._goes.set()

    async def __aenter__(self) -> SteppingEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self.running

    async def complete(self, prompt: Any, params: Any, **_: Any) -> Result:
        self.running += 1
        self.asked += 1
        for _step in range(self.asked + 2):
            await asyncio.sleep(0)
            await self._goes.wait()
            self.steps += 1
        self.running -= 1
        sample = made_sample((5, 6, 7), ((0, 3, self.version),))
        cut_short = made_sample((5,), ((0, 1, self.version),), finish_reason="deadline")
        samples = (*[sample] * (params.n - 1), cut_short)
        return Result(request_id="a", prompt_token_ids=prompt, samples=samples)

    async def pause(self) -> None:
        self._goes.clear()
        self.log.append("pause")

    async def resume(self) -> None:
        self._goes.set()
        self.log.append("resume")

    async def update_weights(self, version: int, source: Any, mode: str) -> None:
        assert (source, mode) == ("the weights", "keep")
        self.version = version
        await turns(self)
        self.log.append(f"weights {version}")


async def turns(engine: SteppingEngine) -> None:
    before = engine.steps
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.running  # something waits
    assert engine.steps == before


async def test_the_engine_rests_while_the_trainer_has_the_loop(rl: Any, monkeypatch: Any) -> None:
    class OneTrainer:
        def __init__(self, folder: Path, *, replay: bool, fixed: bool) -> None:
            assert replay
            assert not fixed
            self.model = "the weights"
            self.replayed_tokens = 17

        async def update(self, batch: list[Any]) -> tuple[list[np.ndarray], float]:
            await turns(SteppingEngine.latest)
            SteppingEngine.latest.log.append(f"train {len(batch)}")
            return [np.full(3, -1.0, np.float32)] * len(batch), 0.0

    monkeypatch.setattr(rl, "Engine", SteppingEngine)
    monkeypatch.setattr(rl, "Trainer", OneTrainer)
    monkeypatch.setattr(rl, "named_tensors", lambda model: model)
    monkeypatch.setattr(rl.small_moe, "problems", lambda n, seed, made=rl.small_moe.problems: made(n + 1, seed))
    told: list[Any] = []
    await rl.run_arm(Path("nowhere"), replay=True, steps=2, problems=2, seed=0, tell=told.append)
    size = 2 * (rl.GROUP - 1)  # one of each group came late
    cycle = ["pause", f"train {size}", "weights {}", "resume"]
    assert SteppingEngine.latest.log == [line.format(step) for step in (1, 2) for line in cycle]
    assert [(one.left_out, one.replayed) for one in told] == [(2, 17)] * 2


def test_figures_tell_samples_that_crossed_an_update(rl: Any) -> None:
    spans = [((0, 3, 4),), ((0, 2, 3), (2, 3, 4)), ((0, 3, 2),)]
    batch = [rl.Experience((5, 2), made_sample((5, 6, 7), own), 1.0, 0.0) for own in spans]
    trainer = [np.full(3, value, np.float32) for value in (-1.5, -3.0, -5.0)]
    told = rl.figures(batch, trainer, version=4, clipped=0.0, rollout_s=1.0, train_s=1.0)
    assert (told.crossed, told.stale, told.reward) == (1, 2 + 3, 1.0)
    # the KL is of what ran under the trainer's weights alone
    assert told.fresh == mismatch([np.full(3, -1.0)], [np.full(3, -1.5)])


@pytest.mark.nightly
@pytest.mark.parametrize("replay", [False, True])
def test_what_was_rewarded_becomes_likelier(rl: Any, model: Path, replay: bool, monkeypatch: Any) -> None:
    """Two samples of different lengths, in micro-batches of one: their log-probs go where their advantages say."""
    trainer = rl.Trainer(model, replay=replay)
    batch = made_batch(rl, ((7, 7, 1.0), (9, 9, -1.0)))
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_short_run_ends_with_a_picture_and_tables(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "2", "--png", "out/loop.png")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert (tmp_path / "out" / "loop.png").read_bytes().startswith(b"\x89PNG")
    for name in ("off", "on"):
        rows = re.findall(rf"^replay {name}: +(?:step|[12]) .*", out, re.MULTILINE)
        # the names of the columns, each above its numbers, then the steps
        assert rows[0].split()[2:5] == ["step", "reward", "K3"], out
        assert len(rows) == 3
        assert len(set(map(len, rows))) == 1, out
    # of the tables at the end: samples that crossed an update, and the KL
    crossed = re.findall(r"replay (?:off|on) +│.*│ +([\d,]+) samples", out)
    replayed = dict(re.findall(r"│ (replay off|replay on) .* samples │ +\d+ │ +0 │ +(\d+) │", out))
    assert replayed["replay off"] == "0", out
    assert int(replayed["replay on"]) > 2 * 12 * 8 * 12, out  # most tokens of all prompts and answers
    assert len(crossed) == 2
    assert all(int(one) > 0 for one in crossed), out
    kl = dict(re.findall(r"│ (replay off|replay on) +│ +[\d,]+ │ ([\d.e+-]+) │", out))
    # with the rollout's own experts no more than bfloat16's rounding is left: 1e-5 where this was written
    assert 0 < float(kl["replay on"]) < 4e-5, out
    assert float(kl["replay on"]) <= float(kl["replay off"]) < 1e-3, out


@pytest.mark.nightly
def test_a_short_run_with_fixed_numerics_ends_with_ratios_of_one(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "2", "--arm", "off", "--numerics", "fixed", "--png", "loop.png")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert re.search(
        r"replay off: [\d,]{3,} tokens of samples that crossed no update: KL 0, every importance ratio 1", out
    )


def test_a_loop_that_promises_ratios_of_one_fails_without_them(rl: Any) -> None:
    report = import_module("rl_loop_report")
    one = rl.mismatch([np.zeros(3, np.float32)], [np.zeros(3, np.float32)])
    zeros = dict.fromkeys(("reward", "crossed", "stale", "clipped", "left_out", "replayed", "rollout_s", "train_s"), 0)
    figures = {**zeros, "fresh": one}
    assert report.verdict({"off": [report.StepFigures(other_bits=0, **figures)]}).startswith("off: 3 tokens")
    with pytest.raises(SystemExit, match="1 of 3 log-probs have other bits"):
        report.verdict({"off": [report.StepFigures(other_bits=1, **figures)]})


def test_masters_round_to_what_the_model_serves(rl: Any) -> None:
    model = rl.torch.nn.Linear(8, 8, bias=False).bfloat16()
    masters = rl.Masters(model)
    assert masters.wide[0].dtype is rl.torch.float32
    model(rl.torch.ones(1, 8, dtype=rl.torch.bfloat16)).sum().backward()
    masters.take_gradients()
    assert model.weight.grad is None
    assert masters.wide[0].grad.eq(1).all()
    with rl.torch.no_grad():
        masters.wide[0] += 1 / 3
    masters.round()
    assert rl.torch.equal(model.weight, masters.wide[0].bfloat16())


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path, rl: Any, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file"):
        monkeypatch.setattr(sys, "argv", ["rl_loop.py", "--folder", str(folder)])
        with pytest.raises(SystemExit, match=r"^rl_loop.py: --folder .*holds something else"):
            rl.main()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.nightly
def test_an_interrupt_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "500", "--arm", "on")
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.match("replay on: +1 ", line):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest
    with pytest.raises(ProcessLookupError):  # its worker has ended too
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())
