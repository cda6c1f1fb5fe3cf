"""Log-probs of prompts against the library's own log-softmax: every family, chunks, both paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import DEVICE, make_small_checkpoint
from fdasync_transformers.sampling import scoring
from fdasync_transformers.sampling.scoring import compute_scores, plan_scores, read_scores
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE as VOCAB
from step_driver import Driver

from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk
from fdasync.runner.prompt_scores import ScoredRun
from fdasync.testing.runners.scores import parts

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = [
    # what stands between decoder and logits differs: nothing, soft caps, scales, heads of their own
    "qwen3_moe",
    *[
        pytest.param(one, marks=pytest.mark.nightly)
        for one in ("gpt_oss", "deepseek_v3", "granitemoe", "mixtral", "llama4_text", "phimoe", "hunyuan_v1_moe")
    ],
]
PROMPT = [(7 * at + 3) % VOCAB for at in range(19)]


def wanted(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)


async def scores(driver: Driver, prompt: list[int], start: int, top: int, chunks: int) -> tuple[Any, Any, Any]:
    """Log-probs, ids and log-probs of alternatives, of a prompt that is computed in so many chunks, beside another."""
    one = driver.sequence(prompt, 2, score_from=start, score_top=top)
    other = driver.sequence([5, 6, 7], 2, raw=True)
    starts, runs = [driver.start(other), driver.start(one)], []
    pieces = np.array_split(np.arange(len(prompt)), chunks)
    for number, piece in enumerate(pieces):
        ours = [Chunk(one.key, len(piece), number == chunks - 1)]
        first = [Chunk(other.key, 3, True)] if number == 0 else []
        if number:
            other.tokens.append(0)
        appends = driver.append(other) if number else []
        output = await driver.step(starts=starts, chunks=[*first, *ours], appends=appends)
        starts = []
        assert {run.key for run in output.scores} <= {one.key}
        runs += output.scores
    await driver.step(leaves=[one.key, other.key])
    at = max(start, 1)
    for run in runs:
        assert run.start == at
        at += run.count
    assert at == len(prompt)
    return tuple(np.concatenate(column) for column in zip(*map(parts, runs), strict=True))


def check(found: tuple[Any, Any, Any], table: torch.Tensor, start: int, error: float) -> None:
    values, ids, best = found
    first = max(start, 1)
    rows = table[first - 1 : len(PROMPT) - 1].numpy()
    assert np.abs(values - rows[np.arange(len(values)), PROMPT[first:]]).max(initial=0.0) <= error
    order = np.argsort(-rows, axis=-1, kind="stable")[:, : ids.shape[1]]
    assert np.abs(best - np.take_along_axis(rows, order, -1)).max(initial=0.0) <= error
    # near ties may change places
    assert np.abs(np.take_along_axis(rows, ids.astype(np.int64), -1) - best).max(initial=0.0) <= error


@pytest.mark.parametrize("family", FAMILIES)
async def test_scores_are_the_librarys_log_softmax(tmp_path: Path, family: str) -> None:
    model = make_tiny_checkpoint(tmp_path, family)
    table = wanted(model, PROMPT)
    driver = await Driver.open(tmp_path, config={"self_check": False})
    assert driver.capacity.scores_prompts
    for start, top, chunks in ((0, 3, 1), (0, 0, 3), (1, 2, 4), (9, VOCAB, 2), (18, 1, 1)):
        check(await scores(driver, PROMPT, start, top, chunks), table, start, 2e-4)
    await driver.close()


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", *[pytest.param(one, marks=pytest.mark.gpu) for one in ("gpt_oss",)]])
async def test_the_path_of_gpus_scores_alike(tmp_path: Path, family: str) -> None:
    model = make_small_checkpoint(tmp_path, family)
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    for start, top, chunks in ((0, 3, 1), (5, 2, 3)):
        check(await scores(driver, PROMPT, start, top, chunks), wanted(model, PROMPT), start, 2e-3)
    await driver.close()


@pytest.mark.gpu
async def test_a_scored_step_between_graphs_changes_no_answer(tmp_path: Path) -> None:
    """A step that scores is launched operation by operation; those before and behind it are graphs."""
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    found = []
    for config in ({"device": "cpu"}, DEVICE):
        driver = await Driver.open(tmp_path, config={"self_check": False, **config}, max_running=8)
        beside = [driver.sequence([number, 7, 9], 12, raw=True) for number in range(3)]
        asked = [driver.sequence(PROMPT, 4, 3 + number, score_from=number, score_top=2) for number in range(3)]
        await driver.run([*beside, *asked], chunks=2)
        found.append(([seq.tokens for seq in (*beside, *asked)], [seq.raw for seq in beside]))
        await driver.close()
    assert found[0][0] == found[1][0]
    assert np.allclose(found[0][1], found[1][1], atol=2e-3)


async def test_logits_are_made_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.setattr(scoring, "SCORE_ROWS", 4)
    driver = await Driver.open(tmp_path, config={"self_check": False})
    head: Any = driver.runner.opened.model.step_model.head  # type: ignore[union-attr]
    asked = []
    plain = head.logits
    monkeypatch.setattr(head, "logits", lambda rows: asked.append(len(rows)) or plain(rows))
    check(await scores(driver, PROMPT, 0, 2, 1), wanted(model, PROMPT), 0, 2e-4)
    assert asked == [4, 4, 4, 4, 2]
    await driver.close()


def test_equals_come_by_id_and_what_is_impossible_is_left_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, float("-inf"), 1.0, float("-inf")]])
    runs = [ScoredRun(8, 1, 0, np.array([3], np.int32), 2), ScoredRun(9, 5, 1, np.array([1], np.int32), 3)]
    plan = plan_scores(runs)
    assert plan is not None
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    results = compute_scores(lambda rows: logits[rows], plan, sent)
    one, two = read_scores(plan, {name: values.numpy() for name, values in results.items()})
    assert (one.key, one.start, one.top) == (8, 1, 2)
    assert parts(one)[1].tolist() == [[1, 2]]
    assert parts(one)[0].tolist() == torch.log_softmax(logits[0].double(), -1)[3:].float().tolist()
    assert parts(two)[1].tolist() == [[2, 0, -1]]
    assert parts(two)[0].tolist() == [float("-inf")]
    assert plan_scores([]) is None
    with pytest.raises(RunnerError, match="NaN"):
        read_scores(plan, {"logprobs": np.full(2, np.nan)})
