"""For test authors: async tests of a system that embeds the engine, in virtual time and with faults.

    pytest examples/test_service.py

The system under test is `Collector`, a small rollout service: it keeps a bounded number of requests going, retries
requests on a second engine that the first one's failure cut short, and never waits longer than its deadline.
The engines run the synthetic runner, whose right answers are known (`expected`), so the tests need no model,
no GPU and no sleep: an hour of simulated time takes milliseconds, and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from fdasync import Engine, EngineConfig, Result, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import EngineFailed
from fdasync.runner.plugins import make_runner
from fdasync.testing import (
    FaultRunner,
    FaultyStore,
    StepFault,
    StoreFaults,
    expected,
    oracle_of,
    synthetic_config,
    synthetic_engine,
)

RunSim = Callable[[Coroutine[Any, Any, Any]], Any]
# without this fixture a test would pass whose fault never struck: the fixture fails it
MustStrike = Callable[[Any], Any]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


class Collector:
    """Collects one answer for each prompt from the first engine that works. Yours would be larger."""

    def __init__(self, engines: Sequence[Engine], *, concurrency: int, deadline_s: float) -> None:
        self._engines = engines
        self._places = asyncio.Semaphore(concurrency)
        self._deadline_s = deadline_s
        self.retries = 0

    async def collect(self, prompts: Sequence[Sequence[int]]) -> list[Result]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def _one(self, prompt: Sequence[int]) -> Result:
        async with self._places:
            for engine in self._engines:
                try:
                    return await engine.complete(prompt, PARAMS, deadline_s=self._deadline_s)
                except EngineFailed:
                    self.retries += 1
            raise RuntimeError("no engine is left")


def slow_engine(seed: int, *, step_s: float = 0.02) -> Engine:
    """A synthetic engine whose steps take time."""
    return synthetic_engine(synthetic_config({"step_s": step_s, "jitter": 0.3, "seed": seed}))


def faulty_runner(seed: int, fault: StepFault) -> FaultRunner:
    """A runner that breaks at one of its steps."""
    config = faulty_config(seed)
    inner = make_runner(config.runner, config.runner_config, config.runner_limits())
    return FaultRunner(inner, Random(seed), max_delay_s=0.01, fault=fault)


def faulty_config(seed: int) -> EngineConfig:
    return synthetic_config({"step_s": 0.02, "jitter": 0.3, "seed": seed}, step_deadline_s=5.0)


class SharedStore(FaultyStore):
    """A store that several engines use, one after the other, and none closes."""

    async def aclose(self) -> None:
        self.end()


def engine_with(store: FaultyStore) -> Engine:
    # computing must cost time, or no block is fetched; nor is one behind a failure that may cost minutes
    config = synthetic_config({"step_s": 0.01, "token_s": 0.01}, max_step_tokens=64, store_deadline_s=5.0)
    return synthetic_engine(config, store=store)


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(100) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def assert_right(results: Sequence[Result], asked: Sequence[Sequence[int]]) -> None:
    oracle = oracle_of(synthetic_config())
    for result, prompt in zip(results, asked, strict=True):
        assert result.token_ids == expected(prompt, PARAMS, 0, oracle).token_ids
        assert result.routing is not None
        assert len(result.routing.array) == len(prompt) + len(result.token_ids) - 1


def test_every_prompt_gets_its_answer(run_sim: RunSim, no_leaks: None) -> None:
    async def scenario() -> None:
        asked = prompts(30, seed=1)
        async with slow_engine(seed=1) as engine:
            assert_right(await Collector([engine], concurrency=8, deadline_s=60).collect(asked), asked)
            engine.check()

    run_sim(scenario())


def test_an_engine_that_dies_costs_retries_and_nothing_else(
    run_sim: RunSim, must_strike: MustStrike, no_leaks: None
) -> None:
    async def scenario() -> None:
        asked = prompts(30, seed=2)
        runner = must_strike(faulty_runner(2, StepFault("die", step_id=20)))
        async with synthetic_engine(faulty_config(2), runner=runner) as first, slow_engine(seed=3) as second:
            collector = Collector([first, second], concurrency=8, deadline_s=60)
            assert_right(await collector.collect(asked), asked)
            assert collector.retries >= 8

    run_sim(scenario())


def test_a_step_that_hangs_is_given_up_at_its_deadline(
    run_sim: RunSim, must_strike: MustStrike, no_leaks: None
) -> None:
    async def scenario() -> float:
        asked = prompts(4, seed=4)
        runner = must_strike(faulty_runner(4, StepFault("hang", step_id=3)))
        async with synthetic_engine(faulty_config(4), runner=runner) as first, slow_engine(seed=5) as second:
            started = asyncio.get_running_loop().time()
            assert_right(await Collector([first, second], concurrency=4, deadline_s=60).collect(asked), asked)
            return asyncio.get_running_loop().time() - started

    # five simulated seconds of waiting for the step, then the second engine
    assert 5.0 <= run_sim(scenario()) < 10.0


def test_a_slow_engine_answers_with_what_it_has_at_the_deadline(run_sim: RunSim, no_leaks: None) -> None:
    async def scenario() -> None:
        asked = prompts(1, seed=6)
        async with slow_engine(seed=6, step_s=1.0) as engine:
            (result,) = await Collector([engine], concurrency=1, deadline_s=4.5).collect(asked)
            assert result.finish_reason == "deadline"
            oracle = oracle_of(synthetic_config())
            assert 0 < len(result.token_ids) < 12
            assert result.token_ids == expected(asked[0], PARAMS, 0, oracle).token_ids[: len(result.token_ids)]

    run_sim(scenario())


@pytest.mark.ci
def test_a_store_that_fails_and_lies_costs_time_and_no_answer(
    run_sim: RunSim, must_strike: MustStrike, no_leaks: None
) -> None:
    async def scenario() -> None:
        asked = prompts(30, seed=7)
        store = must_strike(SharedStore(MemoryStore(MemoryConfig()), StoreFaults()))
        async with engine_with(store) as first:
            assert_right(await Collector([first], concurrency=4, deadline_s=60).collect(asked), asked)
        # half of what is read has a wrong bit, or ends too early; every fifth call fails
        store.plan = StoreFaults(seed=8, flip_bit=0.3, truncate=0.3, fail_call=0.2)
        async with engine_with(store) as second:
            results = await Collector([second], concurrency=4, deadline_s=60).collect(asked)
            assert_right(results, asked)
            found = sum(result.usage.cached_tokens for result in results)
            assert 0 < found < sum(result.usage.prompt_tokens for result in results), "some of it was read"

    run_sim(scenario())
