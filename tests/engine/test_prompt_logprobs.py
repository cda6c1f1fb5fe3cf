"""Log-probs of prompts, through an engine's public face: which positions are scored, whatever caches and steps do."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import BadInput
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import (
    check_idle,
    check_prompt_logprobs,
    check_sample,
    held_engine,
    oracle_of,
    synthetic_config,
    synthetic_engine,
)

PROMPT = [token % 90 for token in range(50)]


def scoring(start: int = 0, top: int = 0, **fields) -> SamplingParams:
    values = {"max_tokens": 4, "temperature": 0.0, **fields}
    return SamplingParams(prompt_logprobs_start=start, prompt_top_logprobs=top, **values)


async def ask(engine: Engine, params: SamplingParams, prompt=PROMPT):
    """Complete, and hold samples and scores against the oracle."""
    result = await engine.complete(prompt, params)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle_of(engine.config))
    check_prompt_logprobs(result, prompt, params, oracle_of(engine.config))
    return result


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("start", [0, 5, 17, 49, 1, 2, 4, 16, 18, 48])
async def test_a_prompt_is_scored_from_where_it_was_asked(start):
    async with synthetic_engine() as engine:
        for _ in range(2):
            # the second time its blocks are cached
            result = await ask(engine, scoring(start, top=3))
            assert result.prompt_logprobs.dtype == np.float32
            assert result.prompt_logprobs.shape == (50 - start,)
            assert np.isnan(result.prompt_logprobs).tolist() == [start == 0] + [False] * (49 - start)
        # position start - 1 is computed, and everything before it may come from the cache
        assert result.cached_tokens == max(start - 1, 0) // 4 * 4
        assert (await ask(engine, SamplingParams(max_tokens=4, temperature=0.0))).prompt_logprobs is None
        check_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
async def test_chunks_of_several_prompts_are_scored_apart(depth):
    config = synthetic_config(max_step_tokens=24, pipeline_depth=depth)
    async with synthetic_engine(config) as engine:
        prompts = [[number, *PROMPT[: 20 + number]] for number in range(8)]
        params = [scoring(number, top=number % 3) for number in range(8)]
        await asyncio.gather(*[ask(engine, *pair) for pair in zip(params, prompts, strict=True)])
        check_idle(engine)


async def test_samples_share_the_scores_of_the_first():
    async with synthetic_engine() as engine:
        result = await ask(engine, scoring(3, n=4, temperature=1.0, seed=5))
        assert [sample.cached_tokens for sample in result.samples] == [0, 48, 48, 48]
        # nobody is scored twice: beside the 50 tokens of the prompt, three samples computed its tail and all their own
        assert engine.stats().scheduler.hit_tokens == 3 * 48


@pytest.mark.ci
async def test_preempted_prompts_keep_what_is_scored():
    config = synthetic_config(runner={"num_blocks": 24, "max_context_tokens": 96}, max_step_tokens=20)
    async with synthetic_engine(config) as engine:
        asked = [([number, *PROMPT[: 12 + number]], scoring(0, top=1, max_tokens=40)) for number in range(12)]
        await asyncio.gather(*[ask(engine, params, prompt) for prompt, params in asked])
        assert engine.stats().scheduler.preemptions > 0
        check_idle(engine)


async def test_one_that_ends_early_has_the_leading_part():
    config = synthetic_config(max_step_tokens=16, pipeline_depth=1)
    engine, faults = held_engine(config)
    async with engine:
        faults.hold()
        task = asyncio.create_task(engine.complete(PROMPT, scoring(0, top=2), request_id="mine"))
        await faults.reached(0)
        faults.release(1)
        await faults.reached(1)
        engine.abort("mine")
        result = await task
        faults.release()
        assert result.finish_reason == "abort"
        assert len(result.prompt_logprobs) == 17
        check_prompt_logprobs(result, PROMPT, scoring(0, top=2), oracle_of(engine.config))


async def test_streams_end_with_the_same_scores():
    async with synthetic_engine() as engine, engine.generate(PROMPT, scoring(7)) as stream:
        async for _ in stream:
            pass
        check_prompt_logprobs(stream.result, PROMPT, scoring(7), oracle_of(engine.config))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (scoring(50), "prompt_logprobs_start"),
        (scoring(-1), "prompt_logprobs_start"),
        (scoring(0, top=65), "prompt_top_logprobs"),
        (SamplingParams(prompt_top_logprobs=1), "prompt_top_logprobs"),
    ],
)
async def test_what_cannot_be_scored_is_refused(params, field):
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput) as caught:
            await engine.complete(PROMPT, params)
        assert caught.value.field == field


async def test_a_runner_that_scores_nothing_is_not_asked(monkeypatch):
    opened = SyntheticRunner.open

    async def without(self):
        return msgspec.structs.replace(await opened(self), scores_prompts=False)

    monkeypatch.setattr(SyntheticRunner, "open", without)
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput, match="scores no prompts") as caught:
            await engine.complete(PROMPT, scoring(0))
        assert caught.value.field == "prompt_logprobs_start"
