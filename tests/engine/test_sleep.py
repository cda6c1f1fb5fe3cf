"""`Engine.sleep` and `wake`: memory goes and comes back, requests go on with exact tokens and rows (docs/design.md,
rule 44)."""

from __future__ import annotations

import asyncio
import os
import signal
from random import Random

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import (
    Asleep,
    BadInput,
    ConfigError,
    EngineClosed,
    EngineFailed,
    UpdateUnderWay,
    WakeFailed,
    WeightsDiffer,
    WeightsRejected,
    WorkerDied,
)
from fdasync.scheduler.replay import replay
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config
from tests.engine.tiers import kept_memory
from tests.engine.updates import PARAMS, PROMPT, ask, oracle_with, play, spans, weights

COSTS = {"step_s": 0.01, "copy_s": 0.002, "sleep_s": 0.5, "load_s": 0.3}
ALL = ("weights", "kv_cache", "cuda_graph")


def config(runner=None, **options):
    return synthetic_config({**COSTS, **(runner or {})}, trace_turns=4096, **options)


def call(engine, number=0, **options):
    return asyncio.create_task(engine.complete([number, *PROMPT], PARAMS, **options))


def check(result, number, engine, weights_id=1):
    check_sample(result.samples[0], [number, *PROMPT], PARAMS, oracle_with(engine, weights_id))


def check_end(engine):
    trace = engine.trace().encode()
    assert replay(trace) == len(trace.splitlines()) - 1
    check_idle(engine)


def folder_of(path, number):
    path.mkdir(exist_ok=True)
    (path / "weights.json").write_text(f'{{"weights_id": {number}}}')
    return str(path)


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_what_ran_goes_on_after_a_sleep_with_its_tokens_and_rows(host_blocks):
    async def work():
        async with Engine(config(host_blocks=host_blocks)) as engine:
            running = [call(engine, number) for number in range(3)]
            await asyncio.sleep(0.095)
            await engine.sleep()
            stats = engine.stats()
            assert stats.released == ALL
            assert engine.load().asleep
            assert engine.load().paused
            # nothing is on the device any more; what was sealed is on the host where there is one
            assert stats.scheduler.free_blocks == stats.scheduler.num_blocks
            assert not engine._runtime.runner._kv.size
            late = call(engine, 7)
            await asyncio.sleep(5)
            assert not any(task.done() for task in [*running, late])
            engine.check()
            await engine.wake()
            assert engine.stats().released == ()
            results = await asyncio.gather(*running, late)
            for number, result in zip((0, 1, 2, 7), results, strict=True):
                check(result, number, engine)
                assert spans(result) == [(0, 16, "0")]
            assert (engine.stats().scheduler.swapped_in_blocks > 0) is bool(host_blocks)
            check_end(engine)

    play(work)


def test_cached_blocks_of_the_device_are_forgotten_and_those_of_the_store_stay():
    async def work():
        store = kept_memory()
        options = {"host_blocks": 64, "store": "memory", "write_through": "all"}
        async with Engine(config(**options), store=store) as engine:
            await ask(engine, 1)
            for _ in range(2):
                await engine.sleep()
                await engine.wake()
            again = await ask(engine, 1)
            # of host or store: the device has forgotten
            cached = again.samples[0].cached
            assert (cached.device, cached.host + cached.store) == (0, 16)
            check_end(engine)

    play(work)


def test_one_word_says_what_the_engine_does():
    async def work():
        async with Engine(config()) as engine:

            def said():
                assert engine.stats().state == engine.load().doing
                assert engine.load().paused is (engine.load().doing != "running")
                return engine.load().doing

            async def meanwhile(call):
                task = asyncio.create_task(call)
                await asyncio.sleep(0.1)
                word = said()
                return word, await task

            assert said() == "running"
            assert await engine.wake() == "running"
            await engine.pause()
            assert said() == "paused"
            assert (await meanwhile(engine.update_weights(1, weights(5))))[0] == "updating"
            assert (await meanwhile(engine.sleep(2)))[0] == "asleep"
            assert await meanwhile(engine.wake(["kv_cache"])) == ("waking", "asleep")
            # they came as tensors
            assert await meanwhile(engine.wake([])) == ("waking", "waits_for_weights")
            assert said() == "waits_for_weights"
            with pytest.raises(WeightsDiffer):
                await engine.update_weights(2, weights(6), expected="0" * 32)
            assert said() == "broken"
            await engine.update_weights(2, weights(6))
            assert said() == "paused"
            await engine.sleep(0)
            assert said() == "asleep"
            assert await engine.wake([]) == "paused"
            await engine.resume()
            assert said() == "running"
            await ask(engine, 6)
            check_end(engine)

    play(work)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_what_each_mode_does_to_requests(mode):
    async def work():
        async with Engine(config(max_running=1)) as engine:
            running, waiting = [call(engine, number) for number in range(2)]
            await asyncio.sleep(0.055)
            await engine.sleep(1, mode)
            for _ in range(3):
                await asyncio.sleep(0)
            assert running.done() is (mode != "keep")
            assert waiting.done() is (mode == "abort")
            await engine.wake()
            first, second = await running, await waiting
            assert first.finish_reason == ("abort" if mode == "abort" else "length")
            assert second.finish_reason == ("abort" if mode == "abort" else "length")
            check(first, 0, engine)
            check_end(engine)

    play(work)


def test_parts_come_back_one_by_one_and_new_weights_between():
    async def work():
        async with Engine(config()) as engine:
            running = call(engine)
            await asyncio.sleep(0.095)
            await engine.sleep(2)
            with pytest.raises(Asleep) as refused:
                await engine.update_weights(1, weights(5))
            assert refused.value.parts == ALL
            await engine.wake(["weights"])
            assert engine.stats().released == ("kv_cache", "cuda_graph")
            await engine.update_weights(1, weights(5), "keep")
            # resuming ends no sleep
            await engine.resume()
            await asyncio.sleep(1)
            assert not running.done()
            await engine.wake(["kv_cache"])
            result = await running
            assert [version for *_, version in spans(result)] == ["0", "1"]
            await ask(engine, 5)
            check_end(engine)

    play(work)


def test_dropped_weights_come_from_their_folder_or_from_an_update(tmp_path, blocking_calls):
    folder, other, away = folder_of(tmp_path / "w", 5), folder_of(tmp_path / "x", 6), tmp_path / "away"

    def move(one, to):
        blocking_calls.deactivate()
        os.rename(one, to)
        blocking_calls.activate()

    async def work():
        async with Engine(config()) as engine:
            await engine.sleep(2)
            await engine.wake()
            asked = call(engine)
            await asyncio.sleep(1)
            assert not asked.done()
            assert (engine.load().asleep, engine.load().paused) == (False, True)
            await engine.update_weights(1, folder)
            check(await asked, 0, engine, 5)
            await engine.sleep(2)
            await engine.wake(["weights"])
            began = asyncio.get_running_loop().time()
            await engine.wake()
            assert asyncio.get_running_loop().time() - began == pytest.approx(2 * 0.5 + 0.3, abs=0.01)
            await ask(engine, 5)
            # the same version names the same weights
            await engine.sleep(2)
            await engine.wake(["weights"])
            await engine.update_weights(1, folder)
            await engine.wake()
            await ask(engine, 5)
            # it cannot be read: said, and mended
            await engine.sleep(2)
            move(folder, away)
            with pytest.raises(WeightsRejected):
                await engine.wake()
            assert engine.load().paused
            move(away, folder)
            await engine.wake()
            await ask(engine, 5)
            # it holds others by now
            await engine.sleep(2)
            move(folder, away)
            move(other, folder)
            with pytest.raises(WeightsDiffer):
                await engine.wake()
            with pytest.raises(WeightsDiffer):
                await call(engine)
            await engine.update_weights(2, folder)
            await ask(engine, 6)
            check_end(engine)

    play(work)


def test_sleeping_and_waking_twice_and_deeper():
    async def work():
        async with Engine(config()) as engine:
            await engine.wake()
            await engine.sleep(1)
            began = asyncio.get_running_loop().time()
            await engine.sleep(1)
            assert asyncio.get_running_loop().time() == began
            await engine.sleep(2)
            await engine.wake()
            await engine.wake()
            asked = call(engine)
            await asyncio.sleep(1)
            # the weights that the first call kept were dropped by the deeper one
            assert not asked.done()
            await engine.update_weights(1, weights(5))
            check(await asked, 0, engine, 5)
            await engine.sleep(0)
            assert engine.stats().released == ()
            waits = call(engine, 3)
            await asyncio.sleep(1)
            assert not waits.done()
            await engine.wake(["scheduling"])
            check(await waits, 3, engine, 5)
            await engine.sleep(1, tags=["kv_cache"])
            assert engine.stats().released == ("kv_cache",)
            await engine.sleep(1)
            assert engine.stats().released == ALL
            await engine.wake()
            await ask(engine, 5)
            check_end(engine)

    play(work)


def test_a_pause_outlasts_a_sleep_and_begins_in_one():
    async def work():
        async with Engine(config()) as engine:
            asked = call(engine)
            await engine.pause()
            await engine.sleep()
            await engine.wake()
            assert engine.load().paused
            await asyncio.sleep(1)
            assert not asked.done()
            await engine.resume()
            check(await asked, 0, engine)
            await engine.sleep()
            await engine.pause("wait")
            await engine.reset_cache()
            await engine.wake()
            assert engine.load().paused
            await engine.resume()
            await ask(engine, 1)
            check_end(engine)

    play(work)


def test_a_wake_that_fails_leaves_it_asleep_and_the_next_one_goes_on():
    async def work():
        async with Engine(config({"fail_wakes": 2})) as engine:
            running = call(engine)
            await asyncio.sleep(0.055)
            await engine.sleep()
            for _ in range(2):
                with pytest.raises(WakeFailed) as failed:
                    await engine.wake()
                assert failed.value.part == "weights"
                assert engine.stats().released == ALL
                assert engine.load().asleep
            await engine.wake(["weights"])
            await engine.wake()
            check(await running, 0, engine)
            check_end(engine)

    play(work)


def test_aborts_deadlines_and_ends_of_callers_while_asleep():
    async def work():
        async with Engine(config(max_running=2)) as engine:
            running, late = call(engine, request_id="mine"), call(engine, 1, deadline_s=2.0)
            await asyncio.sleep(0.055)
            sleeping = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0.2)
            sleeping.cancel()
            # its caller is gone, and it goes on
            await asyncio.sleep(1)
            assert engine.stats().released == ALL
            assert engine.abort("mine")
            assert (await running).finish_reason == "abort"
            assert (await late).finish_reason == "deadline"
            asleep = call(engine, 3, deadline_s=1.0)
            result = await asleep
            assert (result.finish_reason, result.token_ids) == ("deadline", ())
            waking = asyncio.create_task(engine.wake())
            await asyncio.sleep(0.2)
            waking.cancel()
            await asyncio.sleep(2)
            await ask(engine, 1)
            check_end(engine)

    play(work)


def test_updates_and_sleeps_do_not_meet():
    async def work():
        async with Engine(config()) as engine:
            update = asyncio.create_task(engine.update_weights(1, weights(5)))
            await asyncio.sleep(0.1)
            with pytest.raises(UpdateUnderWay):
                await engine.sleep()
            with pytest.raises(UpdateUnderWay):
                await engine.wake()
            await update
            sleeping = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0.1)
            with pytest.raises(UpdateUnderWay, match="sleep"):
                await engine.update_weights(2, weights(6))
            # a wake waits for the sleep that is under way
            await engine.wake()
            await sleeping
            await ask(engine, 5)
            for wrong in (3, True, "1"):
                with pytest.raises(BadInput, match="level"):
                    await engine.sleep(wrong)
            with pytest.raises(BadInput, match="tags"):
                await engine.wake("weights")
            with pytest.raises(BadInput, match="tags"):
                await engine.sleep(tags=["kv"])
            with pytest.raises(BadInput, match="mode"):
                await engine.sleep(1, "retract")
            await ask(engine, 5)
            check_end(engine)

    play(work)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("after", [None, ["weights"]])
def test_a_close_while_asleep_ends_requests(level, after):
    async def work():
        async with Engine(config(host_blocks=32)) as engine:
            asked = call(engine)
            await asyncio.sleep(0.055)
            await engine.sleep(level)
            if after is not None:
                await engine.wake(after)
        assert (await asked).finish_reason == "abort"
        with pytest.raises(EngineClosed):
            await engine.wake()

    play(work)


def test_a_close_during_a_sleep_ends_it():
    async def work():
        engine = Engine(config())
        await engine.start()
        sleeping = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.1)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await sleeping

    play(work)


@pytest.mark.ci
def test_a_worker_that_dies_asleep_fails_the_engine():
    async def work():
        async with Engine(synthetic_config(host_blocks=16, process="worker")) as engine:
            await engine.complete(PROMPT, PARAMS)
            await engine.sleep()
            (pid,) = engine.worker_pids
            asked = call(engine)
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineFailed) as failed:
                await asked
            assert isinstance(failed.value.__cause__, WorkerDied)
            with pytest.raises(EngineFailed):
                await engine.wake()

    with no_leaks():
        asyncio.run(work())


def test_a_runner_that_cannot_sleep_says_why():
    async def work():
        async with Engine(config()) as engine:
            # as the runner of an engine whose blocks other instances have mapped says
            runtime = engine._runtime
            runtime.capacity = msgspec.structs.replace(runtime.capacity, no_sleep="its blocks are mapped elsewhere")
            with pytest.raises(ConfigError, match="mapped elsewhere"):
                await engine.sleep()
            await ask(engine, 1)

    play(work)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(6))
def test_sleeps_under_load(seed):
    """Requests come and go, and sleeps of all kinds begin at any time."""
    random = Random(seed)

    async def client(engine, number):
        await asyncio.sleep(random.uniform(0, 6))
        params = SamplingParams(max_tokens=random.randint(1, 24), temperature=random.choice([0.0, 1.0]), seed=number)
        prompt = [number % 7, *range(random.randint(4, 40))]
        result = await engine.complete(prompt, params)
        check_sample(result.samples[0], prompt, params, oracle_of(engine.config))
        assert result.finish_reason == "length"

    async def work():
        print("seed", seed)
        options = {"num_blocks": 24, "pass_stamp": True, "fail_wakes": seed % 3, "jitter": 0.3}
        store = {"store": "memory", "write_through": "all"} if seed % 2 else {}
        depth = 1 + seed % 2
        async with Engine(config(options, host_blocks=random.choice([0, 40]) or 40 * bool(store), pipeline_depth=depth,
                                 max_requests=100, **store)) as engine:  # fmt: skip
            clients = [asyncio.create_task(client(engine, number)) for number in range(40)]
            for _ in range(4):
                await asyncio.sleep(random.uniform(0, 1))
                await engine.sleep(1, random.choice(["keep", "wait"]))
                engine.check()
                await asyncio.sleep(random.uniform(0, 1))
                while engine.stats().released:
                    tags = random.choice([None, ["weights"], ["kv_cache"], ["cuda_graph", "kv_cache"]])
                    try:
                        await engine.wake(tags)
                    except WakeFailed:
                        assert seed % 3
            await asyncio.gather(*clients)
            # writes to the store end behind the requests whose blocks they write
            await asyncio.sleep(1)
            check_end(engine)

    with no_leaks():
        run_sim(work())
