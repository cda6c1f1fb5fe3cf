"""The test author: async tests of a system that embeds the engine, in virtual time and with faults.

    pytest examples/test_service.py

The system under test is `Collector`, a small rollout service: it keeps a bounded number of requests going,
retries what an engine's failure cut short on a second engine, and never waits longer than its deadline.
The engines run the synthetic runner, whose right answers are known (`expected`), so the tests need no model,
no GPU and no sleep: an hour of simulated time takes milliseconds, and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from fdasync import Engine, EngineFailed, Result, SamplingParams
from fdasync.registry import Registry
from fdasync.testing import EdgeRunner, Fault, expected, oracle_of, synthetic_config, synthetic_engine

RunSim = Callable[[Coroutine[Any, Any, Any]], Any]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


class Collector:
    """Yours would be larger. Collects one answer for each prompt from the first engine that is well."""

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


def faulty_engine(seed: int, fault: Fault | None = None, *, step_s: float = 0.02) -> Engine:
    """A synthetic engine whose steps take time, and which may break at one of them."""
    config = synthetic_config({"step_s": step_s, "jitter": 0.3, "seed": seed}, step_deadline_s=5.0)
    runner_type = Registry().load_runner("synthetic")
    inner = runner_type(oracle_of(config).config, config.runner_limits())
    return synthetic_engine(config, runner=EdgeRunner(inner, Random(seed), max_delay_s=0.01, fault=fault))


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
        async with faulty_engine(seed=1) as engine:
            assert_right(await Collector([engine], concurrency=8, deadline_s=60).collect(asked), asked)
            engine.check()

    run_sim(scenario())


def test_an_engine_that_dies_costs_retries_and_nothing_else(run_sim: RunSim, no_leaks: None) -> None:
    async def scenario() -> None:
        asked = prompts(30, seed=2)
        async with faulty_engine(seed=2, fault=Fault("die", step_id=20)) as first, faulty_engine(seed=3) as second:
            collector = Collector([first, second], concurrency=8, deadline_s=60)
            assert_right(await collector.collect(asked), asked)
            assert collector.retries >= 8

    run_sim(scenario())


def test_a_step_that_hangs_is_given_up_at_its_deadline(run_sim: RunSim, no_leaks: None) -> None:
    async def scenario() -> float:
        asked = prompts(4, seed=4)
        async with faulty_engine(seed=4, fault=Fault("hang", step_id=3)) as first, faulty_engine(seed=5) as second:
            started = asyncio.get_running_loop().time()
            assert_right(await Collector([first, second], concurrency=4, deadline_s=60).collect(asked), asked)
            return asyncio.get_running_loop().time() - started

    # five simulated seconds of waiting for the step, then the second engine
    assert 5.0 <= run_sim(scenario()) < 10.0


def test_a_slow_engine_answers_with_what_it_has_at_the_deadline(run_sim: RunSim, no_leaks: None) -> None:
    async def scenario() -> None:
        asked = prompts(1, seed=6)
        async with faulty_engine(seed=6, step_s=1.0) as engine:
            (result,) = await Collector([engine], concurrency=1, deadline_s=4.5).collect(asked)
            assert result.finish_reason == "deadline"
            oracle = oracle_of(synthetic_config())
            assert 0 < len(result.token_ids) < 12
            assert result.token_ids == expected(asked[0], PARAMS, 0, oracle).token_ids[: len(result.token_ids)]

    run_sim(scenario())
