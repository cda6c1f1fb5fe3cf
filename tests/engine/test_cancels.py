"""Each call of an engine, cancelled after every number of turns: its caller gets CancelledError or the answer, and
nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from fdasync import Engine, Grammar, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.testing import check_idle, check_sample, oracle_of, run_sim, synthetic_config, synthetic_engine, until
from tests.engine.updates import weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PROMPT = [token % 50 for token in range(14)]
PLAIN = SamplingParams(max_tokens=3, temperature=0.0)
# a call that needs more turns than this waits for something without end
_MOST_TURNS = 400


def make(process: str, store: bool) -> Engine:
    config = synthetic_config(
        {"chosen_top_k": 3, "vocab_size": 60}, process=process, max_requests=6, max_running=4, request_deadline_s=600.0,
        chosen_positions_nbytes=3000, **({"host_blocks": 8} if store else {}),
    )  # fmt: skip
    return synthetic_engine(config, store=MemoryStore(MemoryConfig()) if store else None)


async def cancelled(call: Callable[[], Awaitable[object]], turns: int) -> bool:
    """Cancel the call after so many turns; whether it had ended by then."""
    task = asyncio.ensure_future(call())
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.wait([task])
    # it may have come to its end in that very turn
    assert task.cancelled() or task.exception() is None, repr(task.exception())
    return False


async def check_whole(engine: Engine) -> None:
    """The engine is as before: it answers, and holds nothing."""
    result = await engine.complete(PROMPT, PLAIN)
    check_sample(result.samples[0], PROMPT, PLAIN, oracle_of(engine.config))
    if engine.config.process == "inline":
        await until(lambda: not engine.stats().scheduler.moving, every_s=0.01)
        assert engine._runtime.runner._lent._rows == {}
    # bytes come back in a turn of the loop
    await asyncio.sleep(0)
    assert (engine.stats().live, engine._frontend._chosen.used, engine._frontend.requests()) == (0, 0, [])
    check_idle(engine)


REQUESTS = {
    "plain": PLAIN,
    "chosen positions": SamplingParams(max_tokens=4, n=2, temperature=0.0, chosen_positions_start=0),
    "prompt log-probs": SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=3, prompt_logprobs_start=0),
    "grammar": SamplingParams(max_tokens=4, temperature=0.0, grammar=Grammar("regex", "%3")),
}


async def play(call: Callable[[Engine], Awaitable[object]], *, store: bool = False) -> None:
    async with make("inline", store) as engine:
        for turns in range(_MOST_TURNS):
            ended = await cancelled(lambda: call(engine), turns)
            await engine.resume()
            await check_whole(engine)
            if ended:
                return
        raise AssertionError(f"it has not ended after {turns} turns")


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_cancelled_after_every_number_of_turns(name, store):
    run_sim(play(lambda engine: engine.complete(PROMPT, REQUESTS[name]), store=store))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_is_cancelled_after_every_number_of_turns(name):
    async def call(engine: Engine) -> None:
        async with engine.generate(PROMPT, REQUESTS[name]) as stream:
            async for _ in stream:
                pass

    run_sim(play(call))


@pytest.mark.ci
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_of_a_worker_is_cancelled_after_every_number_of_turns(name):
    # turns of a real loop: how many a call takes is not known, and the first ones are those in which things are lent
    async with make("worker", store=False) as engine:
        for turns in range(12):
            await cancelled(lambda: engine.complete(PROMPT, REQUESTS[name]), turns)
            await check_whole(engine)


@pytest.mark.parametrize("name", ["chosen positions", "prompt log-probs"])
def test_a_deadline_that_passes_in_any_turn_leaves_nothing(name):
    async def call() -> None:
        async with make("inline", store=False) as engine:
            for turns in range(_MOST_TURNS):
                task = asyncio.ensure_future(engine.complete(PROMPT, REQUESTS[name], request_id="it", deadline_s=500.0))
                for _ in range(turns):
                    await asyncio.sleep(0)
                ended = task.done()
                request = engine._frontend.find("it")
                if request is not None and request.limit is not None:
                    request.limit.reschedule(0.0)
                elif request is not None:
                    engine.abort("it")
                result = await task
                assert len(result.samples) == REQUESTS[name].n
                await check_whole(engine)
                if ended:
                    return
            raise AssertionError("it has not ended")

    run_sim(call())


CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "pause": lambda engine: engine.pause(),
    "reset": lambda engine: engine.reset_cache(),
    "abort": lambda engine: engine.complete(PROMPT, PLAIN, request_id="other"),
    "fingerprint": lambda engine: engine.weights_fingerprint(),
    "pause retract": lambda engine: engine.pause("retract"),
    "pause wait": lambda engine: engine.pause("wait"),
    "pause abort": lambda engine: engine.pause("abort"),
}


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_cancelled_after_every_number_of_turns_beside_a_request(name):
    async def work() -> None:
        async with make("inline", store=True) as engine:
            for turns in range(_MOST_TURNS):
                request = asyncio.ensure_future(engine.complete(PROMPT, REQUESTS["chosen positions"]))
                await asyncio.sleep(0)
                ended = await cancelled(lambda: CALLS[name](engine), turns)
                await engine.resume()
                # of a pause that ended requests too
                result = await request
                assert len({sample.finish_reason for sample in result.samples}) == 1
                del request, result
                await check_whole(engine)
                if ended:
                    return
            raise AssertionError("it has not ended")

    run_sim(work())


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("way", ["update", "parts", "sleep"])
def test_a_change_is_cancelled_after_every_number_of_turns(way, mode):
    """It goes on to its end behind a caller that left, beside a request that must end too."""

    async def change(engine: Engine, number: int) -> None:
        if way == "update":
            await engine.update_weights(number + 1, weights(1), mode)
        elif way == "parts":
            await engine.begin_weight_update(mode)
            await engine.end_weight_update(number + 1)
        else:
            await engine.sleep(1, mode)
            await engine.wake()

    async def call() -> None:
        config = synthetic_config({"chosen_top_k": 3, "weights_id": 1}, request_deadline_s=600.0)
        async with synthetic_engine(config) as engine:
            for turns in range(_MOST_TURNS):
                request = asyncio.ensure_future(engine.complete(PROMPT, REQUESTS["chosen positions"]))
                await asyncio.sleep(0)
                ended = await cancelled(lambda number=turns: change(engine, number), turns)
                await until(lambda: engine.weights.control.change in ("nothing", "open"), every_s=0.01)
                await engine.abandon_weight_update()
                await engine.wake()
                await engine.resume()
                result = await request
                assert len({sample.finish_reason == "abort" for sample in result.samples}) == 1
                del request, result
                await check_whole(engine)
                if ended:
                    return
            raise AssertionError("it has not ended")

    run_sim(call())
