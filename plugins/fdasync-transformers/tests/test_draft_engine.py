"""Drafts through whole engines of real checkpoints: whatever is drafted, results are those without drafts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from device_path import DEVICE, ON_GPU, make_small_checkpoint
from draft_results import Known, assert_same
from fdasync_transformers.execution import triton_paging
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fdasync import Result

PROMPTS = [[number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 14)]] for number in range(4)]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0, logprobs="raw"),
    SamplingParams(max_tokens=17, temperature=1.0, seed=3, n=2, logprobs="both"),
    SamplingParams(
        max_tokens=18, temperature=0.8, seed=4, repetition_penalty=1.2, presence_penalty=0.3, logprobs="raw"
    ),
]


def config(folder: Path, speculation: Speculation | None) -> EngineConfig:
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
    # too few blocks for all: some are preempted
    sizes = {"block_tokens": 4, "num_blocks": 30, "max_context_tokens": 64, "max_running": 6, "max_step_tokens": 48}
    return EngineConfig(
        model=str(folder), runner_config=own, process="inline", tokenizer="none", speculation=speculation, **sizes
    )


async def play(engine: Engine) -> list[Result]:
    return list(await asyncio.gather(*[engine.complete(prompt, one) for prompt in PROMPTS for one in PARAMS]))


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v32"])
async def test_results_are_those_without_drafts(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    async with Engine(config(tmp_path, None)) as engine:
        wanted = await play(engine)
        plain = engine.stats().scheduler
    answers: dict[bytes, list[tuple[int, ...]]] = {}
    for number, result in enumerate(wanted):
        prompt = np.array(PROMPTS[number // len(PARAMS)], "<i4").tobytes()
        answers.setdefault(prompt, []).extend(sample.token_ids for sample in result.samples)
    speculation = Speculation(drafter="known", max_tokens=3, budget=False)
    limits = DrafterLimits.of(3, 2, 6)
    async with Engine(config(tmp_path, speculation), drafter=Known(answers, limits)) as engine:
        assert_same(await play(engine), wanted)
        stats = engine.stats().scheduler
        engine.check()
    assert stats.preemptions
    assert stats.accepted_tokens > 50
    assert stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps < plain.steps


@pytest.mark.heavy("drafts through the kernels of GPUs, once")
@pytest.mark.ci(after=1)
@pytest.mark.parametrize("numerics", ["default", pytest.param("fixed", marks=pytest.mark.gpu)])
async def test_kernels_give_the_results_of_the_host(
    tmp_path: Path, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in flight, rows of a sequence in tiles: on a GPU where there is one, else in Triton's interpreter."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    tokens = 20 if ON_GPU else 5
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, logprobs="raw")
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    prompts = [prompt[:5] for prompt in PROMPTS[:2]]

    async def play_two(engine: Engine) -> list[Result]:
        work = [engine.complete(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        return list(await asyncio.gather(*work))

    async with Engine(config(tmp_path, None)) as engine:
        wanted = await play_two(engine)
    answers = {
        np.array(prompt, "<i4").tobytes(): [sample.token_ids for sample in result.samples]
        for prompt, result in zip(prompts, wanted, strict=True)
    }
    # rows of each call
    sizes: dict[str, list[int]] = {"attend_rows": [], "attend_decode": []}
    for name, seen in sizes.items():
        monkeypatch.setattr(triton_paging, name, _counted(getattr(triton_paging, name), seen))
    asked = config(tmp_path, Speculation(drafter="known", max_tokens=3, budget=False))
    # fixed numerics are proven by the self-check
    own = {**asked.runner_config, **DEVICE, "self_check": numerics == "fixed"}
    asked = msgspec.structs.replace(asked, runner_config=own, numerics=numerics)
    async with Engine(asked, drafter=Known(answers, DrafterLimits.of(3, 2, 6))) as engine:
        assert_same(await play_two(engine), wanted)
        stats = engine.stats().scheduler
        engine.check()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert max(sizes["attend_rows"]) > 2
    # steps without drafts; on a GPU both kinds are captured at the start
    assert sizes["attend_decode"]
    assert ON_GPU or max(sizes["attend_decode"]) <= 2


def _counted(attend: Callable[..., None], seen: list[int]) -> Callable[..., None]:
    def counted(query: Any, *rest: Any, **more: Any) -> None:
        seen.append(len(query))
        attend(query, *rest, **more)

    return counted
