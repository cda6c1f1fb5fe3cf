"""A whole engine over a runner whose steps yield up to four tokens of a sequence."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import SamplingParams
from fdasync.errors import ConfigError
from fdasync.events.catalog import StepDone
from fdasync.scheduler.replay import replay
from fdasync.testing import (
    LetterTokenizer,
    check_deltas,
    check_sample,
    oracle_of,
    synthetic_config,
    synthetic_engine,
)

PROMPTS = [[1, 2, 3], list(range(20)), [5] * 15, list(range(40, 49))]
RUNS = {"max_run_tokens": 4, "pass_stamp": True, "values_spec": True, "vocab_size": 60, "num_blocks": 24}
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=33, seed=3, logprobs="both", top_logprobs=2, n=2),
    SamplingParams(max_tokens=17, seed=4, stop=("ab", "q")),
    SamplingParams(max_tokens=50, seed=5, stop_token_ids=(3, 9, 11)),
]


def runs_config(**values):
    return synthetic_config(RUNS, **{"pipeline_depth": 2, "max_running": 4, "max_step_tokens": 64, **values})


async def read(engine, prompt, params):
    async with engine.generate(prompt, params) as stream:
        deltas = [delta async for delta in stream]
    check_deltas(deltas, stream.result)
    return stream.result


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tiers", [{}, {"host_blocks": 12, "store": "memory"}], ids=["device", "store"])
async def test_every_result_is_the_one_of_one_token_a_step(tiers, depth):
    config = runs_config(pipeline_depth=depth, **tiers)
    async with synthetic_engine(config, tokenizer=LetterTokenizer()) as engine:
        async with engine.bus.subscribe(StepDone, limit=4096) as steps:
            # too many for the blocks: some are preempted
            results = await asyncio.gather(
                *[read(engine, prompt, params) for prompt in PROMPTS for params in PARAMS],
            )
            runs = [event.counts or () for event in [await anext(steps) for _ in range(steps.pending)]]
        for number, result in enumerate(results):
            prompt, params = PROMPTS[number // len(PARAMS)], PARAMS[number % len(PARAMS)]
            for sample in result.samples:
                check_sample(sample, prompt, params, oracle_of(config))
        assert {1, 2, 3, 4} == {count for counts in runs for count in counts} - {0}
        assert engine.stats().scheduler.preemptions
        assert replay(engine.trace().encode())


@pytest.mark.ci
async def test_runs_come_through_a_worker_process():
    config = runs_config(process="worker")
    async with synthetic_engine(config) as engine:
        params = SamplingParams(max_tokens=30, seed=1, logprobs="raw")
        result = await read(engine, PROMPTS[1], params)
        check_sample(result.samples[0], PROMPTS[1], params, oracle_of(config))
        # the prefill's step, and fewer than one for each further token
        assert engine.stats().scheduler.steps < 20


async def test_a_budget_that_cannot_hold_the_runs_is_refused():
    config = synthetic_config(RUNS, pipeline_depth=1, max_running=8, max_step_tokens=31)
    with pytest.raises(ConfigError, match=r"cannot hold 4 tokens of each of max_running=8"):
        async with synthetic_engine(config):
            raise AssertionError("it started")
