"""The modes of `Engine.pause`, cancelled and undone, with updates of the weights between (docs/design.md, rule 36)."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, PauseMode, SamplingParams
from fdasync.errors import BadInput, WeightsBroken
from fdasync.scheduler.replay import replay
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config
from tests.engine.updates import PARAMS, PROMPT, ask, oracle_with, play, spans, weights

COSTS = {"step_s": 0.01}
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort", "wait")
# of a request that runs alone
WHOLE_S = 16 * 0.01


def config(**options):
    return synthetic_config(COSTS, max_running=1, trace_turns=4096, **options)


def call(engine, number=0, **options):
    return asyncio.create_task(engine.complete([number, *PROMPT], PARAMS, **options))


def now():
    return asyncio.get_running_loop().time()


async def callers_turn():
    """Those whose requests have ended run."""
    for _ in range(3):
        await asyncio.sleep(0)


def check_end(engine):
    trace = engine.trace().encode()
    assert replay(trace) == len(trace.splitlines()) - 1
    check_idle(engine)


@pytest.mark.parametrize("mode", MODES)
def test_what_runs_and_what_waits_in_every_mode(mode):
    async def work():
        async with Engine(config(max_requests=2)) as engine:
            running, waiting, outside = [call(engine, number) for number in range(3)]
            await asyncio.sleep(0.055)
            assert engine.stats().waiting_for_place == 1
            began = now()
            await engine.pause(mode)
            stats = engine.stats()
            assert (stats.scheduler.paused, stats.steps_in_flight) == (True, 0)
            if mode == "wait":
                await callers_turn()
                assert running.done()
                assert now() - began == pytest.approx(WHOLE_S - 0.055, abs=0.03)
            else:
                assert now() - began < 0.03
            if mode == "abort":
                results = [await task for task in (running, waiting, outside)]
                assert [result.finish_reason for result in results] == ["abort"] * 3
                assert 0 < len(results[0].token_ids) < 16
                check_sample(results[0].samples[0], [0, *PROMPT], PARAMS, oracle_of(engine.config))
            assert stats.scheduler.running == (1 if mode == "in_place" else 0)
            later = call(engine, 7)
            await asyncio.sleep(0.5)
            assert not later.done()
            assert waiting.done() == (mode == "abort")
            await engine.pause(mode)
            await callers_turn()
            assert later.done() == (mode == "abort")
            await engine.resume()
            await engine.resume()
            for number, task in enumerate((running, waiting, outside)):
                if mode != "abort":
                    check_sample((await task).samples[0], [number, *PROMPT], PARAMS, oracle_of(engine.config))
                    assert (await task).finish_reason == "length"
            assert (await later).finish_reason == ("abort" if mode == "abort" else "length")
            assert (await call(engine, 8)).finish_reason == "length"
        check_end(engine)

    play(work)


@pytest.mark.parametrize("mode", MODES)
def test_weights_change_while_paused_in_every_mode(mode):
    async def work():
        async with Engine(config()) as engine:
            running = call(engine)
            await asyncio.sleep(0.055)
            await engine.pause(mode)
            await engine.update_weights(1, weights(50), "keep")
            later = asyncio.create_task(ask(engine, 50))
            await asyncio.sleep(0.3)
            assert not later.done()
            await engine.resume()
            assert spans(await later) == [(0, 16, "1")]
            result = await running
            first = spans(result)[0]
            assert (first[0], first[2]) == (0, "0")
            assert (len(result.token_ids) == 16) == (mode != "abort")
            assert [span[2] for span in spans(result)] == (["0"] if mode in ("abort", "wait") else ["0", "1"])
            if mode == "retract":
                # its tokens stay, the rest is what the new weights say after them
                known = [0, *PROMPT, *result.token_ids[: first[1]]]
                whole = oracle_with(engine, 50).generate(known, 16 - first[1])
                assert result.token_ids[first[1] :] == tuple(whole)
        check_end(engine)

    play(work)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_update_interrupts_a_pause_that_waits_and_it_goes_on_to_wait(mode):
    async def work():
        async with Engine(config()) as engine:
            running, waiting = call(engine), call(engine, 1)
            await asyncio.sleep(0.055)
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0.02)
            await engine.update_weights(1, weights(50), mode)
            await callers_turn()
            # none is left where the update aborts what ran
            assert pausing.done() == (mode == "abort")
            await pausing
            await callers_turn()
            assert engine.stats().scheduler.paused
            assert running.done()
            assert (await running).finish_reason == ("length" if mode == "keep" else "abort")
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await engine.resume()
            assert spans(await waiting) == [(0, 16, "1")]
        check_end(engine)

    play(work)


def test_a_load_that_breaks_ends_a_pause_that_waits():
    async def work():
        async with Engine(config()) as engine:
            running = call(engine)
            await asyncio.sleep(0.055)
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0)
            engine._runtime.runner.end_tensors = None
            with pytest.raises(WeightsBroken):
                await engine.update_weights(1, weights(50), "keep")
            await pausing
            assert engine.stats().scheduler.paused
            engine.abort_all()
            assert (await running).finish_reason == "abort"

    play(work)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_pause_is_taken_back(mode):
    async def work():
        async with Engine(config()) as engine:
            running = call(engine)
            await asyncio.sleep(0.055)
            pausing = asyncio.create_task(engine.pause(mode))
            await asyncio.sleep(0.002)
            pausing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pausing
            assert (await running).finish_reason == ("abort" if mode == "abort" else "length")
            assert (await call(engine, 1)).finish_reason == "length"
        check_end(engine)

    play(work)


def test_one_that_is_cancelled_leaves_another_that_waits():
    async def work():
        async with Engine(config()) as engine:
            running, waiting = call(engine), call(engine, 1)
            await asyncio.sleep(0.055)
            first = asyncio.create_task(engine.pause("wait"))
            second = asyncio.create_task(engine.pause())
            await asyncio.sleep(0.001)
            second.cancel()
            await asyncio.wait([second])
            await asyncio.sleep(0.02)
            # it runs again
            assert not first.done()
            await first
            await callers_turn()
            assert running.done()
            assert not waiting.done()
            await engine.resume()
            await waiting
        check_end(engine)

    play(work)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_pause_on_top_of_another_has_been_read_when_it_returns(mode):
    async def work():
        async with Engine(config()) as engine:
            call(engine)
            await asyncio.sleep(0.055)
            await engine.pause()
            assert engine.stats().scheduler.running == 1
            await engine.pause(mode)
            assert engine.stats().scheduler.running == 0
            await engine.resume()
            await asyncio.sleep(0.5)
        check_end(engine)

    play(work)


def test_resume_ends_a_pause_that_waits():
    async def work():
        async with Engine(config()) as engine:
            running, waiting = call(engine), call(engine, 1)
            await asyncio.sleep(0.055)
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0.02)
            await engine.resume()
            await pausing
            assert not engine.stats().scheduler.paused
            assert not running.done()
            await asyncio.gather(running, waiting)
        check_end(engine)

    play(work)


@pytest.mark.parametrize("way", ["parts", "load"])
def test_resume_ends_a_pause_that_waits_for_an_update(way):
    async def work():
        loop = asyncio.get_running_loop()
        config = synthetic_config({"step_s": 0.01, "load_s": 2.0}, update_deadline_s=30.0)
        async with Engine(config) as engine:
            if way == "parts":
                await engine.begin_weight_update()
            else:
                update = asyncio.create_task(engine.update_weights(1, weights(50)))
                await asyncio.sleep(0.05)
            pauses = [asyncio.create_task(engine.pause("wait")) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert not any(pause.done() for pause in pauses)
            began = loop.time()
            await engine.resume()
            await asyncio.wait(pauses)
            assert loop.time() - began < 0.01
            assert engine.load().doing == "updating"
            if way == "parts":
                await engine.end_weight_update()
            else:
                await update
            # the pauses are undone, and nothing is left of them
            assert engine.load().doing == "running"
            assert (await engine.complete([1, 2], SamplingParams(max_tokens=2))).finish_reason == "length"

    play(work)


def test_a_pause_that_waits_takes_as_long_as_the_longest_deadline():
    async def work():
        async with Engine(config(step_deadline_s=1.0)) as engine:
            long = asyncio.create_task(
                engine.complete(PROMPT, SamplingParams(max_tokens=200, temperature=0.0), deadline_s=1.9)
            )
            await asyncio.sleep(0.05)
            await engine.pause("wait")
            # longer than steps may take
            assert now() == pytest.approx(1.9, abs=0.05)
            assert (await long).finish_reason == "deadline"
        check_end(engine)

    play(work)


async def test_an_unknown_mode_is_refused():
    async with Engine(synthetic_config()) as engine:
        for mode in ("keep", None, 3, ["wait"]):
            with pytest.raises(BadInput) as caught:
                await engine.pause(mode)
            assert caught.value.field == "mode"
        assert not engine.stats().scheduler.paused
