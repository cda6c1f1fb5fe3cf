"""Engines of models with recurrent layers whose steps verify drafts: results are those without drafts, and the next
turn of a conversation goes on from the snapshot that the answer's steps took, whichever of them came there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from device_path import DEVICE, ON_GPU
from draft_results import Known, assert_same
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

KERNELS = ("qwen3_next", "lfm2_moe", "nemotron_h", "granitemoehybrid", "kimi_linear", "bailing_hybrid")
FAMILIES = (*KERNELS, "zaya", "minimax")
SPECULATION = Speculation(drafter="known", max_tokens=3, budget=False)
MORE = (77, 78, 79)


def config(folder: Path, **values: Any) -> EngineConfig:
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
    own |= values.pop("runner_config", {})
    sizes = {"block_tokens": 4, "num_blocks": 90, "max_context_tokens": 72, "max_running": 4, "max_step_tokens": 48}
    return EngineConfig(
        model=str(folder), tokenizer="none", runner_config=own, **{**sizes, "process": "inline", **values}
    )


class Talk:
    """Two turns of some conversations, all first ones at once."""

    def __init__(self, count: int, tokens: int) -> None:
        self.prompts = [
            [number + 3, *[(number * 31 + at * 7) % 90 + 3 for at in range(1, 10)]] for number in range(count)
        ]
        self.params = [
            SamplingParams(
                max_tokens=tokens + number, temperature=0.7 * (number % 2), seed=number, logprobs="raw", ignore_eos=True
            )
            for number in range(count)
        ]

    async def play(self, engine: Engine, *, turns: bool = True) -> list[Result]:
        asked = zip(self.prompts, self.params, strict=True)
        results = list(await asyncio.gather(*[engine.complete(prompt, one) for prompt, one in asked]))
        if turns:
            for prompt, result, one in zip(self.prompts, list(results), self.params, strict=True):
                more = [*prompt, *result.samples[0].token_ids, *MORE]
                results.append(await engine.complete(more, one))
        engine.check()
        return results

    def drafter(self, results: list[Result]) -> Known:
        """That knows these, and is wrong in each third token."""
        answers = {
            np.array(result.prompt_token_ids, "<i4").tobytes(): [result.samples[0].token_ids] for result in results
        }
        return Known(answers, DrafterLimits.of(SPECULATION.max_tokens, 2, 4))


def begun_behind(results: list[Result]) -> list[int]:
    """How many leading tokens of the second turns were not computed."""
    return [result.samples[0].cached_tokens for result in results[len(results) // 2 :]]


@pytest.mark.heavy("drafts beside recurrent state, in one engine on CPUs")
@pytest.mark.parametrize(
    "family", ["qwen3_next", *[pytest.param(one, marks=pytest.mark.nightly) for one in FAMILIES[1:]]]
)
async def test_drafts_change_nothing(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    talk = Talk(5, 13)
    # places for all that is taken
    places = {"num_snapshots": 60, "host_blocks": 0}
    async with Engine(config(tmp_path, **places)) as engine:
        wanted = await talk.play(engine)
        plain = engine.stats().scheduler
    drafted = config(tmp_path, speculation=SPECULATION, **places)
    async with Engine(drafted, drafter=talk.drafter(wanted)) as engine:
        results = await talk.play(engine)
        stats = engine.stats().scheduler
    assert_same(results, wanted)
    assert begun_behind(results) == begun_behind(wanted)
    assert min(begun_behind(results)) >= 20
    assert stats.steps < plain.steps
    assert 20 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.ci
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.gpu) for one in KERNELS]
    if ON_GPU
    else ["lfm2_moe", pytest.param("qwen3_next", marks=pytest.mark.nightly)],
)
async def test_kernels_give_the_results_of_the_host(tmp_path: Path, family: str) -> None:
    """Two steps in flight, so the device alone knows which state goes on: graphs on a GPU, else the interpreter."""
    make_tiny_checkpoint(tmp_path, family)
    talk = Talk(4, 17) if ON_GPU else Talk(1, 8)
    async with Engine(config(tmp_path, num_snapshots=40, host_blocks=0)) as engine:
        wanted = await talk.play(engine)
    own = {**DEVICE, "self_check": ON_GPU, "cuda_graphs": ON_GPU}
    drafted = config(tmp_path, speculation=SPECULATION, num_snapshots=40, host_blocks=0, runner_config=own)
    drafted = msgspec.structs.replace(drafted, pipeline_depth=2)
    async with Engine(drafted, drafter=talk.drafter(wanted)) as engine:
        results = await talk.play(engine)
        stats = engine.stats().scheduler
    assert_same(results, wanted, ordered=False)
    assert begun_behind(results) == begun_behind(wanted)
    assert min(begun_behind(results)) > 10
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.nightly
async def test_ranks_and_preemption(tmp_path: Path) -> None:
    """Few blocks and few places, the host's tier, two ranks: all that interrupts a sequence between its drafts."""
    make_tiny_checkpoint(tmp_path, "qwen3_next")
    talk = Talk(6, 19)
    few = {"num_blocks": 22, "num_snapshots": 6, "host_blocks": 64}
    async with Engine(config(tmp_path, **few)) as engine:
        wanted = await talk.play(engine)
    for ranks in ({}, {"tensor_parallel": 2, "process": "worker"}):
        drafted = config(tmp_path, speculation=SPECULATION, **few, **ranks)
        async with Engine(drafted, drafter=talk.drafter(wanted)) as engine:
            results = await talk.play(engine)
            stats = engine.stats().scheduler
        assert_same(results, wanted)
        assert stats.preemptions
        assert stats.resumed_snapshots > 2
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
