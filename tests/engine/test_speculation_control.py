"""Engines that draft, stopped in the middle of runs: aborts, pauses, updates of the weights, hand-overs."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, PauseMode, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.scheduler.replay import replay
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.engines import expected
from tests.engine.updates import PROMPT, oracle_with, play, weights
from tests.support.drafters import Foretold

pytestmark = pytest.mark.usefixtures("forked_children")

PARAMS = SamplingParams(max_tokens=40, seed=3, n=2)
KINDS = ("right", "half", "wild")
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort", "wait")


def config(**values):
    speculation = Speculation(drafter="foretold", max_tokens=3, budget=False)
    return synthetic_config(
        {"step_s": 0.01, "token_s": 0.0}, speculation=speculation, max_running=4, trace_turns=4096, **values
    )


def drafter(kind, config):
    oracle = oracle_of(config)
    found = [(PROMPT, expected(PROMPT, PARAMS, index, oracle).token_ids) for index in range(2)]
    return Foretold(kind, found, DrafterLimits.of(3, config.pipeline_depth, 4))


def check_end(engine, kind):
    trace = engine.trace().encode()
    assert replay(trace, make_drafter=lambda *_: drafter(kind, engine.config))
    check_idle(engine)
    assert engine.stats().scheduler.drafted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_inside_a_run_keeps_what_was_accepted(kind):
    async def work():
        async with Engine(config(), drafter=drafter(kind, config())) as engine:
            call = asyncio.create_task(engine.complete(PROMPT, PARAMS, request_id="a"))
            await asyncio.sleep(0.065)
            engine.abort("a")
            result = await call
            assert result.finish_reason == "abort"
            for sample in result.samples:
                assert 0 < len(sample.token_ids) < 40
                check_sample(sample, PROMPT, PARAMS, oracle_of(engine.config))
            if kind == "right":
                # more than one a step
                assert len(result.samples[0].token_ids) > 8
        check_end(engine, kind)

    play(work)


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_inside_a_run_changes_no_token(kind, mode):
    async def work():
        async with Engine(config(), drafter=drafter(kind, config())) as engine:
            call = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.045)
            await engine.pause(mode)
            assert engine.stats().steps_in_flight == 0
            engine.check()
            await asyncio.sleep(0.1)
            await engine.resume()
            result = await call
            assert result.finish_reason == ("abort" if mode == "abort" else "length")
            for sample in result.samples:
                check_sample(sample, PROMPT, PARAMS, oracle_of(engine.config))
        check_end(engine, kind)

    play(work)


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_make_their_own_tokens_whatever_is_drafted(kind):
    """The drafter goes on with what the old weights would have said."""

    async def work():
        async with Engine(config(), drafter=drafter(kind, config())) as engine:
            call = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.045)
            await engine.update_weights("1", weights(99), "keep")
            drafted = engine.stats().scheduler.drafted_tokens
            for sample in (await call).samples:
                old, new = sample.weight_version
                assert (old.version, new.version, new.stop) == ("0", "1", 40)
                want = expected(PROMPT, PARAMS, sample.index, oracle_of(engine.config)).token_ids
                assert sample.token_ids[: old.stop] == want[: old.stop]
                assert sample.token_ids != want
            # the first draft behind the update was of the old weights at least
            assert engine.stats().scheduler.drafted_tokens > drafted > 0
            await engine.update_weights("2", weights(98))
            for sample in (await engine.complete(PROMPT, PARAMS)).samples:
                check_sample(sample, PROMPT, PARAMS, oracle_with(engine, 98))
        check_end(engine, kind)

    play(work)
