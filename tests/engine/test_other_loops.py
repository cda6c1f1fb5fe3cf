"""An engine that is used from another loop than its own, or from another thread: refused by name, closing included."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from fdasync import Engine, Generator, SamplingParams
from fdasync.errors import WrongLoop
from fdasync.testing import check_idle, synthetic_config, synthetic_engine
from tests.engine.updates import weights

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)


async def read(engine: Engine) -> None:
    async with engine.generate([1, 2], PARAMS) as stream:
        async for _ in stream:
            pass


#: every verb that does something
VERBS = {
    "generate": read,
    "complete": lambda engine: engine.complete([1, 2], PARAMS),
    "complete_all": lambda engine: engine.complete_all([[1, 2]], PARAMS),
    "abort": lambda engine: engine.abort("name"),
    "abort_all": lambda engine: engine.abort_all(),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(mode="abort"),
    "wake": lambda engine: engine.wake(),
    "reset_cache": lambda engine: engine.reset_cache(),
    "update_weights": lambda engine: engine.update_weights(2, weights(1)),
    "join_weights_group": lambda engine: engine.join_weights_group(None),
    "leave_weights_group": lambda engine: engine.leave_weights_group("g"),
    "begin_weight_update": lambda engine: engine.begin_weight_update(),
    "end_weight_update": lambda engine: engine.end_weight_update(),
    "abandon_weight_update": lambda engine: engine.abandon_weight_update(),
    "set_weight_version": lambda engine: engine.set_weight_version(2),
    "weights_fingerprint": lambda engine: engine.weights_fingerprint(),
    "profile": lambda engine: engine.profile(1.0),
    "drain": lambda engine: engine.drain(),
    "aclose": lambda engine: engine.aclose(),
}
#: these read what there is, and wait for nothing
LOOKS = {"stats", "facts", "load", "watch", "sight", "trace", "check"}


def test_the_table_has_every_verb():
    public = {name for name, _ in inspect.getmembers(Generator, inspect.isfunction) if not name.startswith("_")}
    assert public - LOOKS - {"start"} <= VERBS.keys()


async def call(verb, engine):
    result = verb(engine)
    return await result if inspect.isawaitable(result) else result


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("process", ["inline", "worker"])
def test_each_verb_is_refused_at_once_and_changes_nothing(process):
    home, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    engine = synthetic_engine(synthetic_config({}, process=process))
    home.run_until_complete(engine.start())
    try:
        for name, verb in VERBS.items():
            with pytest.raises(WrongLoop, match="started on another event loop") as caught:
                other.run_until_complete(asyncio.wait_for(call(verb, engine), 60))
            assert caught.value.what == "engine"
            assert engine.state == "running", name
        assert engine.stats().state == "running"
        assert home.run_until_complete(engine.complete([1, 2], PARAMS)).finish_reason == "length"
    finally:
        home.run_until_complete(engine.aclose())
        assert engine.state == "closed"
        # what has ended may be closed once more, from anywhere
        other.run_until_complete(engine.aclose())
        check_idle(engine)
        for loop in (home, other):
            loop.close()


def test_a_thread_of_its_own_is_refused_while_the_loop_runs():
    caught = []

    async def work():
        async with synthetic_engine(synthetic_config({})) as engine:

            def abort():
                try:
                    engine.abort_all()
                except WrongLoop as error:
                    caught.append(error)

            await asyncio.to_thread(abort)
            assert engine.abort_all() == 0

    asyncio.run(work())
    assert len(caught) == 1


def test_outside_of_a_loop_that_rests_it_may_be_asked():
    home = asyncio.new_event_loop()
    engine = synthetic_engine(synthetic_config({}))
    assert engine.abort("name") is False
    home.run_until_complete(engine.start())
    assert engine.abort("name") is False
    home.run_until_complete(engine.aclose())
    home.close()
