"""What a plugin or a caller does wrong stays with who did it, and whoever waits is told."""

from __future__ import annotations

import asyncio
import re

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import (
    BadInput,
    ConfigError,
    DeadlineExceeded,
    DecodeFailed,
    EngineFailed,
    InvariantBroken,
    PluginError,
    RunnerError,
    WorkerDied,
)
from fdasync.events.catalog import StepDone
from fdasync.runner.base import StepOutput
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import (
    LetterTokenizer,
    check_sample,
    held_engine,
    oracle_of,
    run_sim,
    synthetic_config,
    synthetic_engine,
    until,
)
from tests.support.helpers import hold_up

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = list(range(1, 11))


class Faulty(SyntheticRunner):
    """Ways for a runner to be wrong inside an engine."""

    way = ""

    def launch(self, step):
        done = super().launch(step)
        if self.way == "misses rows" and self._flights:
            # the capture misses decodes; the third step fails
            self._flights[-1].batch.generations = self._flights[-1].batch.generations + (step.step_id != 0)
        return done

    def _complete(self, flight):
        if self.way == "leaves a spec out":
            del flight.rows["values"]
        if self.way == "casts a spec":
            flight.rows["values"] = flight.rows["values"].astype("float32")
        if self.way == "names another step" and flight.batch.step_id == 2:
            flight.output = StepOutput(1, flight.output.tokens)
        super()._complete(flight)

    async def aclose(self):
        await super().aclose()
        if self.way == "close raises":
            raise OSError("the device is gone")
        if self.way == "close hangs":
            await asyncio.get_running_loop().create_future()


def faulty_engine(way, runner=None, **values):
    config = synthetic_config({"pass_stamp": False, "values_spec": False, **(runner or {})}, **values)
    inner = Faulty(oracle_of(config).config, config.runner_limits())
    inner.way = way
    return synthetic_engine(config, runner=inner, tokenizer=LetterTokenizer())


async def test_rows_that_were_never_written_do_not_keep_a_failure_from_the_callers():
    async with faulty_engine("misses rows", {"fail_step": 3}) as engine:
        # no block fills before the failure: the rows that are missing are looked for only then
        prompts = [[50 + key, *PROMPT, 1, 2] for key in range(2)]
        calls = [asyncio.create_task(engine.complete(prompt, GREEDY)) for prompt in prompts]
        done, _ = await asyncio.wait(calls, timeout=300)
        assert len(done) == 2
        for call in calls:
            error = call.exception()
            assert isinstance(error, EngineFailed)
            (sample,) = error.partial.samples
            # whole blocks of the prefill are there, and nothing that was not written
            rows = sample.routing.array
            assert len(rows) == 12
            oracle = oracle_of(engine.config)
            assert (rows == oracle.rows(oracle.digests(error.partial.prompt_token_ids))[:12]).all()
            assert any("were not written" in note for note in getattr(error.cause, "__notes__", [])), repr(error.cause)
            assert sample.finish_reason == "failed"
        assert engine.state == "failed"


@pytest.mark.parametrize(
    ("way", "told"),
    [("leaves a spec out", r"step 0: .*without \['values'\]"), ("casts a spec", "step 0: .*'values' are float32")],
)
async def test_a_step_whose_rows_are_not_those_of_the_specs_fails_the_engine(way, told):
    async with faulty_engine(way, {"values_spec": True}) as engine:
        with pytest.raises(EngineFailed) as caught:
            await engine.complete(PROMPT, GREEDY)
        assert isinstance(caught.value.__cause__, RunnerError)
        assert re.search(told, str(caught.value.__cause__))
        partial = caught.value.partial
        assert (len(partial.samples[0].routing.array), len(partial.samples[0].aux["values"])) == (0, 0)


async def test_a_callers_list_is_read_once():
    config = synthetic_config(max_requests=8)
    async with synthetic_engine(config) as engine:
        blocker = engine.generate(PROMPT, SamplingParams(max_tokens=200, temperature=0.0, n=8))
        async with blocker as stream:
            prompt = list(PROMPT)
            waiting = asyncio.create_task(engine.complete(prompt, GREEDY))
            await until(lambda: engine.stats().waiting_for_place > 0)
            prompt.extend(range(100))
            prompt[0] = 10**6
            stream.abort()
            result = await waiting
        assert result.prompt_token_ids == tuple(PROMPT)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(config))


@pytest.mark.both_loops
async def test_a_blocked_loop_stalls_the_engine_and_does_not_fail_it():
    config = synthetic_config({"step_s": 0.05}, step_deadline_s=1.0)
    async with synthetic_engine(config) as engine:
        async with engine.bus.subscribe(StepDone) as steps:
            call = asyncio.create_task(engine.complete(PROMPT, GREEDY))
            await anext(steps)
        hold_up(1.5)
        check_sample((await call).samples[0], PROMPT, GREEDY, oracle_of(config))
        assert engine.stats().loop_late_max_s > 1.0


class Picky(LetterTokenizer):
    """Cannot decode one token."""

    def __init__(self, token):
        self.token = token

    def decode(self, token_ids):
        if self.token in token_ids:
            raise IndexError(f"token {self.token} has no piece")
        return super().decode(token_ids)


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
@pytest.mark.parametrize("streams", [True, False])
async def test_tokens_that_cannot_be_decoded_fail_their_own_request_only(streams, stop):
    config = synthetic_config()
    oracle = oracle_of(config)
    outputs = oracle.generate(PROMPT, 10)
    other = [5, 6, 7]
    token = next(token for token in outputs[2:] if token not in oracle.generate(other, 10))
    params = SamplingParams(max_tokens=10, temperature=0.0, stop=stop)

    async def stream(engine):
        async with engine.generate(PROMPT, params) as deltas:
            return [delta async for delta in deltas]

    async with synthetic_engine(config, tokenizer=Picky(token)) as engine:
        fine = asyncio.create_task(engine.complete(other, params))
        with pytest.raises(DecodeFailed, match="has no piece") as caught:
            await (stream(engine) if streams else engine.complete(PROMPT, params))
        assert isinstance(caught.value.cause, IndexError)
        sample = caught.value.partial.samples[0]
        assert sample.token_ids == tuple(outputs[: len(sample.token_ids)])
        assert len(sample.routing.array) == max(len(PROMPT) + len(sample.token_ids) - 1, 0)
        check_sample((await fine).samples[0], other, params, oracle)
        assert engine.state == "running"


async def test_a_runner_that_completes_another_step_fails_the_engine():
    async with faulty_engine("names another step") as engine:
        with pytest.raises(EngineFailed, match="completed step 1 before step 2") as caught:
            await engine.complete(PROMPT, GREEDY)
        assert isinstance(caught.value.cause, InvariantBroken)


@pytest.mark.parametrize(("way", "error"), [("close raises", OSError), ("close hangs", DeadlineExceeded)])
async def test_a_runner_that_does_not_close_is_told_once_and_the_rest_is_freed(way, error, monkeypatch):
    monkeypatch.setattr("fdasync.engine.runtime._REAP_S", 0.1)
    engine = faulty_engine(way, close_deadline_s=0.05)
    await engine.start()
    await engine.complete(PROMPT, GREEDY)
    arena = engine._runtime._arena
    with pytest.raises(error):
        await engine.aclose()
    assert arena.region.fd < 0
    assert engine.state == "closed"
    await engine.aclose()


async def test_a_runner_that_dies_while_the_engine_closes_is_not_waited_for():
    engine, faults = held_engine(synthetic_config(close_deadline_s=3600.0))
    async with engine:
        faults.hold()
        call = asyncio.create_task(engine.complete(PROMPT, GREEDY))
        await faults.reached(0)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        faults.die()
        await closing
        try:
            assert (await call).finish_reason == "abort"
        except EngineFailed as failure:
            assert isinstance(failure.cause, WorkerDied)  # noqa: PT017


async def test_a_tap_on_an_engine_that_is_closed_ends_at_once():
    async with synthetic_engine() as engine:
        bus = engine.bus
    async with asyncio.timeout(300), bus.subscribe() as tap:
        assert [event async for event in tap] == []


async def test_priority_holds_at_the_frontend_too():
    config = synthetic_config(max_requests=8)
    ended = []
    async with synthetic_engine(config) as engine:

        async def call(name, priority):
            await engine.complete(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, n=8), priority=priority)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for name, priority in (("first", 0), ("low", -1), ("middle", 0), ("high", 5), ("later", 0)):
                group.create_task(call(name, priority))
    assert ended == ["first", "high", "middle", "later", "low"]


async def test_a_scheduler_that_cannot_be_salvaged_does_not_keep_a_failure_from_the_callers(monkeypatch):
    async with faulty_engine("", {"fail_step": 3}) as engine:

        def salvage():
            raise KeyError("the counts are wrong")

        monkeypatch.setattr(engine._runtime.driver.scheduler, "salvage", salvage)
        with pytest.raises(EngineFailed) as caught:
            await engine.complete(PROMPT, GREEDY)
        assert caught.value.partial.finish_reason == "failed"
        assert any("the counts are wrong" in note for note in caught.value.cause.__notes__)


async def test_a_callers_stop_strings_are_read_once():
    config = synthetic_config()
    oracle = oracle_of(config)
    text = LetterTokenizer().decode(oracle.generate(PROMPT, 10))
    stops = [text[4:6]]
    params = SamplingParams(max_tokens=10, temperature=0.0, stop=stops)
    async with (
        synthetic_engine(config, tokenizer=LetterTokenizer()) as engine,
        engine.generate(PROMPT, params) as stream,
    ):
        stops.clear()
        stops.append(5)
        async for _ in stream:
            pass
        assert (stream.result.finish_reason, stream.result.text) == ("stop", text[: text.find(text[4:6])])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_steps_deadline_does_not_count_the_step_before_it(depth):
    async def play():
        config = synthetic_config({"step_s": 0.15}, step_deadline_s=0.25, pipeline_depth=depth)
        async with synthetic_engine(config) as engine:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            check_sample((await engine.complete(PROMPT, params)).samples[0], PROMPT, params, oracle_of(config))

    run_sim(play())


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda engine: engine.drain(float("nan")), "timeout_s"),
        (lambda engine: engine.drain("soon"), "timeout_s"),
        (lambda engine: engine.drain(-1), "timeout_s"),
        (lambda engine: engine.complete(PROMPT, {}), "params"),
        (lambda engine: engine.complete(PROMPT, GREEDY, routing="yes"), "routing"),
        (lambda engine: engine.complete(PROMPT, GREEDY, aux="values"), "aux"),
        (lambda engine: engine.complete(PROMPT, GREEDY, cache_salt="a\ud800"), "cache_salt"),
        (lambda engine: engine.complete(PROMPT, GREEDY, request_id="\udcff"), "request_id"),
        (lambda engine: engine.complete(PROMPT, GREEDY, deadline_s=True), "deadline_s"),
        (lambda engine: engine.complete(PROMPT, GREEDY, request_id=""), "request_id"),
        (lambda engine: engine.complete("x" * 70_000, GREEDY), "prompt"),
    ],
)
async def test_arguments_that_make_no_sense_are_named_and_cost_other_requests_nothing(call, field):
    async with synthetic_engine(tokenizer=LetterTokenizer()) as engine:
        with pytest.raises(BadInput) as caught:
            await call(engine)
        assert caught.value.field == field
        with pytest.raises(BadInput, match="request_id"):
            engine.abort([])
        assert engine.state == "running"
        check_sample((await engine.complete(PROMPT, GREEDY)).samples[0], PROMPT, GREEDY, oracle_of(engine.config))


@pytest.mark.parametrize("config", [None, [1], 5])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(ConfigError, match="mapping is needed"):
        Engine(config)


def test_a_tokenizer_that_is_not_there_is_named():
    with pytest.raises(PluginError, match="not installed"):
        synthetic_engine(synthetic_config(tokenizer="nope"))


async def test_a_runner_whose_start_raises_is_named(monkeypatch):
    async def broken(self):
        raise ValueError("what is this")

    monkeypatch.setattr(SyntheticRunner, "open", broken)
    engine = synthetic_engine()
    with pytest.raises(RunnerError, match="ValueError: what is this"):
        await engine.start()


async def test_the_id_that_ended_a_request_is_named():
    config = synthetic_config()
    outputs = oracle_of(config).generate(PROMPT, 10)
    params = SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=(outputs[5],))
    async with synthetic_engine(config) as engine:
        (sample,) = (await engine.complete(PROMPT, params)).samples
        assert (sample.finish_reason, sample.stop_token_id) == ("stop", outputs[5])
        assert (await engine.complete(PROMPT, GREEDY)).samples[0].stop_token_id is None


async def test_what_closing_raised_is_told_though_the_first_caller_was_cancelled():
    engine = faulty_engine("close raises")
    await engine.start()
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(OSError, match="the device is gone"):
        await engine.aclose()
    await engine.aclose()


async def test_a_start_that_fails_is_told_before_a_close_that_fails(monkeypatch):
    async def broken(self):
        raise ValueError("what is this")

    monkeypatch.setattr(Faulty, "open", broken)
    engine = faulty_engine("close raises")
    with pytest.raises(RunnerError, match="ValueError: what is this"):
        await engine.start()
    with pytest.raises(OSError, match="the device is gone"):
        await engine.aclose()
