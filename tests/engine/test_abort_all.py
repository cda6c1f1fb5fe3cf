"""`Engine.abort_all` reaches a request wherever it is: at the frontend, in preparation, in the queue, in a step."""

from __future__ import annotations

import asyncio

from fdasync import Engine, SamplingParams
from fdasync.events.actions import FinishRequest
from fdasync.testing import check_idle, check_sample, held_engine, oracle_of, run_sim, synthetic_config, until
from tests.engine.updates import PARAMS, PROMPT

COSTS = {"step_s": 0.01}


def test_it_ends_what_runs_what_queues_and_what_waits_for_a_place():
    async def work():
        async with Engine(synthetic_config(COSTS, max_running=1, max_requests=3)) as engine:
            calls = [
                asyncio.create_task(engine.complete([number, *PROMPT], PARAMS, request_id=f"r{number}"))
                for number in range(6)
            ]
            await asyncio.sleep(0.055)
            stats = engine.stats()
            # one runs, two queue, three wait for a place
            assert (stats.live, stats.waiting_for_place, stats.scheduler.running) == (3, 3, 1)
            assert engine.abort_all("r") == 6
            results = await asyncio.gather(*calls)
            assert [result.finish_reason for result in results] == ["abort"] * 6
            assert 0 < len(results[0].token_ids) < 16
            assert [result.token_ids for result in results[1:]] == [()] * 5
            check_sample(results[0].samples[0], [0, *PROMPT], PARAMS, oracle_of(engine.config))
            assert engine.abort_all() == 0
            # an abort counts for the requests of that moment
            assert (await engine.complete(PROMPT, PARAMS)).finish_reason == "length"
        check_idle(engine)

    run_sim(work())


def test_a_request_counts_until_it_has_ended():
    async def work():
        async with Engine(synthetic_config(COSTS)) as engine:
            call = asyncio.create_task(engine.complete(PROMPT, PARAMS, request_id="mine"))
            await asyncio.sleep(0.05)
            # the turn that ends it is still to come
            assert (engine.abort_all(), engine.abort_all("mine"), engine.abort_all("other")) == (1, 1, 0)
            assert (await call).finish_reason == "abort"

    run_sim(work())


async def test_samples_of_one_request_count_once_and_end_with_a_step_in_flight():
    engine, faults = held_engine(synthetic_config(trace_turns=64))
    async with engine:
        faults.hold()
        call = asyncio.create_task(engine.complete(PROMPT, SamplingParams(max_tokens=16, n=3)))
        await faults.reached(0)
        assert engine.abort_all() == 1
        result = await call
        assert [sample.finish_reason for sample in result.samples] == ["abort"] * 3
        ends = [
            action for _, actions in engine.trace()._turns for action in actions if isinstance(action, FinishRequest)
        ]
        assert len(ends) == 3
        faults.release()
        await until(lambda: not engine.stats().steps_in_flight)
    check_idle(engine)
