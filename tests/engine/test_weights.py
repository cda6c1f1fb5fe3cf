"""Pauses and weight updates of whole engines: what goes on, what ends, and that nothing old is ever matched."""

from __future__ import annotations

import asyncio
import json

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import DeadlineExceeded, EngineFailed
from fdasync.events.catalog import StepDone
from fdasync.testing import check_idle, check_sample, held_engine, oracle_of, synthetic_config, until
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.engine.updates import PARAMS, PROMPT, ask, oracle_with, play, spans, weights

COSTS = {"step_s": 0.01, "token_s": 0.001}


@pytest.fixture
def folder(tmp_path):
    """Checkpoint folders of the synthetic model, made before any loop runs."""
    for number in (70, 71, 99):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "weights.json").write_text(json.dumps({"weights_id": number}))
    return lambda number: tmp_path / str(number)


# -- updates


@pytest.mark.parametrize("process", ["inline", pytest.param("worker", marks=pytest.mark.ci)])
@pytest.mark.parametrize("way", ["folder", "tensors"])
async def test_new_weights_answer_and_nothing_old_is_matched(process, way, folder):
    async with Engine(synthetic_config(process=process)) as engine:
        first = await ask(engine, 1)
        assert (await ask(engine, 1)).cached.device == 16
        before = engine.capacity.weights_id
        await engine.update_weights(7, folder(99) if way == "folder" else weights(99))
        assert engine.capacity.weights_id != before
        after = await ask(engine, 99)
        assert after.cached.total == 0
        assert after.token_ids != first.token_ids
        assert spans(after) == [(0, 16, "7")]
        assert (await ask(engine, 99)).cached.device == 16
        assert engine.stats().scheduler.weight_version == "7"
    check_idle(engine)


def test_keep_continues_on_the_old_kv_and_abort_ends_with_what_there_is():
    async def work():
        async with Engine(synthetic_config(COSTS)) as engine:
            kept = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.1)
            await engine.update_weights(1, weights(50), "keep")
            aborted = asyncio.create_task(engine.complete([9, *PROMPT], PARAMS))
            result = await kept
            (old, new) = spans(result)
            assert old[0] == 0
            assert old[2] == "0"
            assert new == (old[1], 16, "1")
            assert len(result.token_ids) == 16
            # until the update it was what the old weights say
            whole = oracle_of(engine.config).generate(PROMPT, 16)
            assert result.token_ids[: old[1]] == tuple(whole[: old[1]])
            assert result.token_ids != tuple(whole)
            assert len(result.routing.array) == 35
            # its blocks are of old KV: nobody gets them
            assert (await ask(engine, 50)).cached.total == 0
            await engine.update_weights(2, weights(51), "abort")
            cut = await aborted
            assert cut.finish_reason in ("abort", "length")
            check_sample(cut.samples[0], [9, *PROMPT], PARAMS, oracle_with(engine, 50))
            assert (await ask(engine, 51)).cached.total == 0
        check_idle(engine)

    play(work)


def test_a_kept_request_that_is_preempted_later_starts_again_and_is_indexed_again():
    async def work():
        config = synthetic_config(
            {**COSTS, "num_blocks": 16, "max_context_tokens": 64}, max_running=4, decode_reserve_blocks=0
        )
        params = SamplingParams(max_tokens=28, temperature=0.0)
        async with Engine(config) as engine:
            calls = [asyncio.create_task(engine.complete([number, *range(15)], params)) for number in range(3)]
            await asyncio.sleep(0.06)
            await engine.update_weights(1, weights(50), "keep")
            results = await asyncio.gather(*calls)
            assert engine.stats().scheduler.preemptions > 0
            assert all(len(result.token_ids) == 28 and len(result.routing.array) == 43 for result in results)
            assert any(len(result.weight_version) == 2 for result in results)
            # somebody's blocks are of the new weights and can be had: those of one who had to start again
            one = SamplingParams(max_tokens=1)
            again = [(await engine.complete([number, *range(15)], one)).cached.total for number in range(3)]
            assert any(again)
            engine.check()

    play(work)


@pytest.mark.parametrize(("running", "after_s"), [(1, 0.15), (8, 0.005), (8, 0.03)])
def test_abort_ends_a_request_with_all_of_its_samples(running, after_s):
    """Samples that wait belong to the one that runs, or that has ended: no result is of two weights."""

    async def work():
        config = synthetic_config(COSTS, max_step_tokens=16, max_running=running)
        async with Engine(config) as engine:
            params = SamplingParams(max_tokens=8, n=3, seed=1, prompt_logprobs_start=0)
            request = asyncio.create_task(engine.complete(PROMPT, params))
            await asyncio.sleep(after_s)
            await engine.update_weights(1, weights(50), "abort")
            result = await request
            assert {span.version for sample in result.samples for span in sample.weight_version} <= {"0"}
            assert result.samples[-1].finish_reason == "abort"
            # with one lane the first sample has ended by then
            assert (result.samples[0].finish_reason == "length") is (running == 1)

    play(work)


def test_requests_at_the_frontend_and_waiting_ones_start_under_the_new_weights():
    async def work():
        async with Engine(synthetic_config(COSTS, max_running=1)) as engine:
            running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.03)
            waiting = asyncio.create_task(ask(engine, 50, [7, *PROMPT]))
            await asyncio.sleep(0.01)
            await engine.update_weights(1, weights(50), "keep")
            assert spans(await waiting) == [(0, 16, "1")]
            await running

    play(work)


def test_no_object_of_old_weights_is_read_and_those_of_weights_that_come_back_are(folder):
    async def work():
        class Kept(FaultyStore):
            async def aclose(self):
                self.end()

        store = Kept(MemoryStore(MemoryConfig()), StoreFaults())
        config = synthetic_config(
            {**COSTS, "token_s": 0.01, "num_blocks": 12, "max_context_tokens": 48}, store="memory", host_blocks=16
        )
        one, two = folder(70), folder(71)
        async with Engine(config, store=store) as engine:
            await engine.update_weights(1, one)
            await ask(engine, 70)
            await until(lambda: not engine.stats().scheduler.writing, 300, 0.1)
            await engine.update_weights(2, two)
            assert (await ask(engine, 71)).cached.total == 0
            await until(lambda: not engine.stats().scheduler.writing, 300, 0.1)
            # the same bytes have the same id, whatever they are called: what was stored under it is right again
            await engine.update_weights(3, one)
            result = await ask(engine, 70)
            assert result.cached.store == 16
            assert spans(result) == [(0, 16, "3")]
            # tensors from memory never share a namespace, not even with themselves
            await engine.update_weights(4, weights(70))
            assert (await ask(engine, 70)).cached.total == 0

    play(work)


# -- pauses


async def test_a_paused_engine_plans_nothing_and_goes_on_where_it_was():
    async with Engine(synthetic_config({"step_s": 0.001})) as engine, engine.bus.subscribe(StepDone) as steps:
        running = asyncio.create_task(ask(engine, 1))
        await until(lambda: engine.stats().scheduler.running > 0)
        await engine.pause()
        await engine.pause()
        assert engine.stats().steps_in_flight == 0
        seen = engine.stats().scheduler.steps
        late = asyncio.create_task(ask(engine, 1, [3, *PROMPT]))
        await asyncio.sleep(0.05)
        assert engine.stats().scheduler.steps == seen
        assert not running.done()
        await engine.resume()
        await engine.resume()
        assert spans(await running) == [(0, 16, "0")]
        await late
        assert steps.pending


async def test_deadlines_and_aborts_go_on_during_a_pause():
    async with Engine(synthetic_config({"step_s": 0.001})) as engine:
        await engine.pause()
        timed = asyncio.create_task(engine.complete(PROMPT, PARAMS, deadline_s=0.05))
        aborted = asyncio.create_task(engine.complete(PROMPT, PARAMS, request_id="mine"))
        assert (await timed).finish_reason == "deadline"
        engine.abort("mine")
        assert (await aborted).finish_reason == "abort"


async def test_a_pause_that_is_lifted_while_it_waits_ends_too():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await faults.reached(0)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.01)
        assert not pausing.done()
        await engine.resume()
        await asyncio.wait_for(pausing, 300)
        faults.release()
        await running


async def test_an_update_keeps_a_pause_that_somebody_asked_for():
    async with Engine(synthetic_config()) as engine:
        await engine.pause()
        await engine.update_weights(1, weights(5))
        call = asyncio.create_task(ask(engine, 5))
        await asyncio.sleep(0.02)
        assert not call.done()
        await engine.resume()
        await call


async def test_a_step_that_never_ends_fails_the_engine_that_should_pause():
    engine, faults = held_engine(synthetic_config(step_deadline_s=0.1, pipeline_depth=1))
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await faults.reached(0)
        with pytest.raises(EngineFailed) as caught:
            await engine.update_weights(1, weights(5))
        assert isinstance(caught.value.cause, DeadlineExceeded)
        with pytest.raises(EngineFailed):
            await running


@pytest.mark.parametrize("way", ["folder", "tensors"])
def test_an_update_that_takes_too_long_fails_the_engine(way, folder):
    async def work():
        loop = asyncio.get_running_loop()
        config = synthetic_config({"load_s": 10.0}, update_deadline_s=2.0)
        with pytest.raises(EngineFailed) as caught:  # noqa: PT012 - it ends the engine
            async with Engine(config) as engine:
                began = loop.time()
                with pytest.raises(EngineFailed):
                    await engine.update_weights(1, folder(99) if way == "folder" else weights(99))
                assert loop.time() - began == pytest.approx(2.0, abs=0.01)
                await engine.complete(PROMPT, PARAMS)
        cause = caught.value.cause
        assert isinstance(cause, DeadlineExceeded)
        assert (cause.what, cause.deadline_s) == ("loading weights", 2.0)

    play(work)


@pytest.mark.parametrize(
    ("values", "opening_s", "limit_s"),
    [({}, 10.0, 150.0), ({"start_deadline_s": 140.0}, 10.0, 140.0), ({"update_deadline_s": 2000.0}, 10.0, 2000.0)],
)
def test_the_deadline_of_updates_follows_from_the_start(values, opening_s, limit_s):
    async def work():
        engine, faults = held_engine(synthetic_config(**values))
        opens = faults.inner.open

        async def slowly():
            await asyncio.sleep(opening_s)
            return await opens()

        faults.inner.open = slowly
        async with engine:
            assert engine._runtime.update_limit_s == pytest.approx(limit_s, abs=0.1)

    play(work)
