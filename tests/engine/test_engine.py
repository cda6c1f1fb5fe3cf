"""What an engine does for its callers, through its public face."""

from __future__ import annotations

import asyncio
import traceback

import numpy as np
import pytest

from fdasync import Engine, EngineConfig, Sample, SamplingParams, Usage
from fdasync.errors import BadInput, ConfigError, InvariantBroken
from fdasync.events.catalog import StepDone
from fdasync.scheduler.replay import replay
from fdasync.testing import (
    check_idle,
    check_sample,
    expected,
    held_engine,
    oracle_of,
    synthetic_config,
    synthetic_engine,
    until,
)
from tests.support.helpers import hold_up

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = list(range(1, 11))


async def ask(engine: Engine, prompt=PROMPT, params=GREEDY, **options):
    """Complete, and hold every sample against the oracle."""
    result = await engine.complete(prompt, params, **options)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle_of(engine.config), start=options.get("start", 0))
    return result


# -- the short way ------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_ten_lines():
    config = {"runner": "synthetic", "process": "inline", "runner_config": {"vocab_size": 50}}
    async with Engine(config) as engine:
        tokens = []
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0)) as stream:
            async for delta in stream:
                tokens += delta.token_ids
        result = stream.result
        assert tuple(tokens) == result.token_ids
        assert result.finish_reason == "length"
        assert result.prompt_token_ids == (1, 2, 3)
        assert result.routing.array.shape == (10, 4, 2)
        check_sample(result.samples[0], [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0),
                     oracle_of(engine.config))  # fmt: skip
    assert engine.state == "closed"


@pytest.mark.ci(after=1)
@pytest.mark.both_loops
@pytest.mark.parametrize("depth", [2, 1])
async def test_many_at_once_are_the_oracles(depth):
    config = synthetic_config(runner={"num_blocks": 24, "max_context_tokens": 96}, pipeline_depth=depth)
    async with synthetic_engine(config) as engine:
        prompts = [[token % 7 for token in range(number, number + 5 + number % 20)] for number in range(30)]
        params = SamplingParams(max_tokens=30, seed=3)
        await asyncio.gather(*[ask(engine, prompt, params) for prompt in prompts])
        assert engine.stats().scheduler.preemptions > 0
        check_idle(engine)


async def test_the_callers_list_is_not_changed_or_kept():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        prompt = list(PROMPT)
        task = asyncio.create_task(engine.complete(prompt, GREEDY))
        await faults.reached(0)
        assert prompt == PROMPT
        prompt[:] = [0] * len(prompt)
        faults.release()
        result = await task
        assert result.prompt_token_ids == tuple(PROMPT)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config))


async def test_prompts_may_be_arrays():
    async with synthetic_engine() as engine:
        array = np.array(PROMPT)
        result = await engine.complete(array, GREEDY)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config))
        assert np.array_equal(array, PROMPT)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([1, 100], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1, 2.5], {}, "prompt"),
        ("text without a tokenizer", {}, "prompt"),
        (PROMPT, {"params": SamplingParams(max_tokens=0)}, "max_tokens"),
        (PROMPT, {"params": SamplingParams(max_tokens=250)}, "max_tokens"),
        (PROMPT, {"params": SamplingParams(top_p=float("nan"))}, "top_p"),
        (PROMPT, {"start": len(PROMPT)}, "start"),
        (PROMPT, {"deadline_s": 0}, "deadline_s"),
        (PROMPT, {"priority": 1.5}, "priority"),
    ],
)
async def test_bad_input_names_its_field_and_starts_nothing(prompt, options, field):
    options = {"params": GREEDY, **options}
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput) as caught:
            await engine.complete(prompt, **options)
        assert caught.value.field == field
        with pytest.raises(BadInput):
            async with engine.generate(prompt, **options):
                pass
        assert engine.stats().scheduler.steps == 0
        check_idle(engine)
        await ask(engine)


# -- streams ------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_deltas_of_a_slow_reader_merge_and_hold_up_no_other():
    params = SamplingParams(max_tokens=40, temperature=0.0)
    async with synthetic_engine() as engine, engine.generate(PROMPT, params) as stream:
        first = await anext(stream)
        # another request runs to its end meanwhile, and so does this one
        await ask(engine, [5] * 10, SamplingParams(max_tokens=60, temperature=0.0))
        check_idle(engine)
        rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert first.token_ids + rest[0].token_ids == stream.result.token_ids
        assert [first.finish_reason, rest[0].finish_reason] == [None, "length"]


async def test_a_fast_reader_gets_each_token_as_it_comes():
    config = synthetic_config(pipeline_depth=1)
    async with synthetic_engine(config) as engine, engine.generate(PROMPT, GREEDY) as stream:
        deltas = [delta async for delta in stream]
        assert [len(delta.token_ids) for delta in deltas] == [1] * 10
        assert stream.result.ttft_s is not None
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.both_loops
async def test_leaving_early_aborts():
    params = SamplingParams(max_tokens=200, temperature=0.0)
    async with synthetic_engine() as engine:
        async with engine.generate(PROMPT, params) as stream:
            async for _ in stream:
                break
        result = stream.result
        assert result.finish_reason == "abort"
        assert 1 <= len(result.token_ids) < 200
        check_sample(result.samples[0], PROMPT, params, oracle_of(engine.config))
        with pytest.raises(ZeroDivisionError):
            async with engine.generate(PROMPT, params) as stream:
                raise ZeroDivisionError
        assert stream.result.finish_reason == "abort"
        await engine.drain()
    check_idle(engine)


async def test_a_stream_has_one_reader_and_no_result_before_its_end():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        async with engine.generate(PROMPT, GREEDY) as stream:
            with pytest.raises(RuntimeError, match="still running"):
                _ = stream.result
            reader = asyncio.create_task(anext(stream))
            await faults.reached(0)
            with pytest.raises(RuntimeError, match="one reader"):
                await anext(stream)
            faults.release()
            assert (await reader).token_ids
        generation = engine.generate(PROMPT, GREEDY)
        async with generation:
            pass
        with pytest.raises(RuntimeError, match="once"):
            async with generation:
                pass


async def test_a_result_reads_as_its_first_sample():
    engine, _ = held_engine()
    async with engine:
        result = await engine.complete(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, logprobs="both"))
    first = result.samples[0]
    for name in (*Sample.__struct_fields__, "cached_tokens", "logprobs"):
        if name != "index":
            assert getattr(result, name) is getattr(first, name) or name == "cached_tokens", name
    assert result.cached_tokens == first.cached_tokens


async def test_text_and_stop_strings():
    engine, _ = held_engine()
    oracle = oracle_of(engine.config)
    whole = expected(PROMPT, SamplingParams(max_tokens=30, temperature=0.0), 0, oracle).text
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("never this", whole[7:10]))
    async with engine:
        async with engine.generate("bcdefghijk", params) as stream:
            deltas = [delta async for delta in stream]
        want = expected(PROMPT, params, 0, oracle)
        assert want.reason == "stop"
        assert stream.result.text == want.text == "".join(delta.text for delta in deltas)
        check_sample(stream.result.samples[0], PROMPT, params, oracle)
        final = await engine.complete("bcdefghijk", params)
        assert (final.text, final.token_ids) == (want.text, want.token_ids)


# -- samples, priorities, prefixes --------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
async def test_samples_of_one_prompt_prefill_it_once(depth):
    steps = []
    engine, _ = held_engine(synthetic_config(pipeline_depth=depth), on_launch=steps.append)
    prompt = [token % 100 for token in range(42)]
    params = SamplingParams(max_tokens=12, n=4, seed=11)
    async with engine:
        async with engine.generate(prompt, params) as stream:
            deltas = [delta async for delta in stream]
        result = stream.result
        for sample in result.samples:
            check_sample(sample, prompt, params, oracle_of(engine.config))
            told = [token for delta in deltas if delta.index == sample.index for token in delta.token_ids]
            assert tuple(told) == sample.token_ids
        assert len({sample.token_ids for sample in result.samples}) == 4
        forwarded = sum(chunk.count for step in steps for chunk in step.chunks)
        # ten whole blocks once, and each sample's open tail of two tokens
        assert forwarded == 40 + 4 * 2
        # rows of the shared prefix are the leader's, to the byte
        first = result.samples[0].aux["stamp"][:40]
        assert all(np.array_equal(sample.aux["stamp"][:40], first) for sample in result.samples)


async def test_usage_counts_a_prompt_once_and_every_samples_tokens():
    prompt = [token % 100 for token in range(42)]
    params = SamplingParams(max_tokens=12, n=4, seed=11)
    async with synthetic_engine() as engine:
        first = await ask(engine, prompt, params)
        # three samples found what the first one computed: that was not spared
        assert sum(sample.cached_tokens for sample in first.samples) == 3 * 40
        assert first.usage == Usage(prompt_tokens=42, cached_tokens=0, completion_tokens=48)
        again = await ask(engine, prompt, params)
        assert again.usage == Usage(prompt_tokens=42, cached_tokens=40, completion_tokens=48)
        one = await ask(engine, prompt[:9], SamplingParams(max_tokens=3, temperature=0.0))
        assert one.usage == Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=3)


async def test_usage_of_what_ended_early_counts_what_there_is():
    prompt = [token % 100 for token in range(42)]
    engine, faults = held_engine(synthetic_config(max_running=1))
    async with engine:
        await ask(engine, prompt)
        faults.hold()
        # one of two runs, the other one has not begun, and found nothing for that reason alone
        task = asyncio.ensure_future(ask(engine, prompt, SamplingParams(max_tokens=50, n=2, seed=1), request_id="two"))
        begun = faults.launched[-1] + 1
        for step in range(begun, begun + 3):
            await faults.reached(step)
            faults.release(1)
        engine.abort("two")
        faults.release()
        result = await task
        assert [sample.cached_tokens for sample in result.samples] == [40, 0]
        tokens = len(result.samples[0].token_ids)
        assert tokens
        assert result.usage == Usage(prompt_tokens=42, cached_tokens=40, completion_tokens=tokens)


async def test_priorities_order_the_queue():
    engine, faults = held_engine(synthetic_config(max_running=1))
    ended = []
    async with engine, asyncio.TaskGroup() as group:
        faults.hold()

        async def call(name, priority):
            await ask(engine, priority=priority, request_id=name)
            ended.append(name)

        group.create_task(call("running", 0))
        await faults.reached(0)
        for name, priority in (("low", -1), ("normal", 0), ("high", 1), ("normal-2", 0)):
            group.create_task(call(name, priority))
        await until(lambda: engine.stats().scheduler.waiting == 4)
        faults.release()
    assert ended == ["running", "high", "normal", "normal-2", "low"]


async def test_prefix_hits_keep_the_rows_of_the_first_computation():
    async with synthetic_engine() as engine:
        first = await ask(engine)
        again = await ask(engine)
        assert (first.cached_tokens, again.cached_tokens) == (0, 8)
        stamps = [result.aux["stamp"][:, 0] for result in (first, again)]
        assert np.array_equal(stamps[0][:8], stamps[1][:8])
        assert (stamps[1][8:] > stamps[0].max()).all()
        # the last token of a prompt is always forwarded, whatever is cached
        whole_blocks = PROMPT[:8]
        assert [(await ask(engine, whole_blocks)).cached_tokens for _ in range(2)] == [4, 4]
        # the answer becomes part of the next prompt
        longer = await ask(engine, [*PROMPT, *first.token_ids, 5])
        assert longer.cached_tokens == 16
        assert engine.stats().scheduler.hit_tokens == 8 + 4 + 4 + 16


async def test_salts_keep_prefixes_apart():
    async with synthetic_engine() as engine:
        cached = [(await ask(engine, cache_salt=salt)).cached_tokens for salt in ("", "a", "a", "b", "")]
    assert cached == [0, 0, 8, 0, 8]


async def test_prefix_cache_off_computes_everything():
    async with synthetic_engine(synthetic_config(prefix_cache=False)) as engine:
        assert [(await ask(engine)).cached_tokens for _ in range(2)] == [0, 0]
        assert engine.stats().scheduler.idle_blocks == 0


# -- rows ---------------------------------------------------------------------------------------------


async def test_start_leaves_rows_out_and_nothing_else():
    async with synthetic_engine() as engine:
        whole = await ask(engine)
        for start in (1, 4, 9):
            part = await ask(engine, start=start)
            assert part.token_ids == whole.token_ids
            assert part.routing.start == start
            assert np.array_equal(part.routing.array, whole.routing.array[start:])
            assert np.array_equal(part.aux["values"], whole.aux["values"][start:])


async def test_rows_that_nobody_wants_are_not_given():
    async with synthetic_engine() as engine:
        result = await engine.complete(PROMPT, GREEDY, routing=False)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config), names=("values", "stamp"))
        result = await engine.complete(PROMPT, GREEDY, routing=False, aux=False)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config), names=())
        # it was captured all the same: the blocks serve one who wants rows
        assert (await ask(engine, routing=True)).cached_tokens == 8


@pytest.mark.parametrize("config", [synthetic_config(routing=False), synthetic_config({"num_moe_layers": 0})])
async def test_without_capture_there_is_no_routing(config):
    async with synthetic_engine(config) as engine:
        result = await engine.complete(PROMPT, GREEDY)
        check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(config), names=("values", "stamp"))
        with pytest.raises(BadInput, match="routing"):
            await engine.complete(PROMPT, GREEDY, routing=True)


async def test_routing_asked_of_a_dense_model_fails_the_start():
    engine = synthetic_engine(synthetic_config({"num_moe_layers": 0}, routing=True))
    with pytest.raises(BadInput, match="routing"):
        await engine.start()
    assert engine.state == "failed"
    await engine.aclose()


async def test_wide_routing_is_uint16():
    async with synthetic_engine(synthetic_config({"num_experts": 300})) as engine:
        assert (await ask(engine)).routing.array.dtype == np.uint16


async def test_results_outlive_the_engine():
    async with synthetic_engine() as engine:
        result = await ask(engine)
    check_sample(result.samples[0], PROMPT, GREEDY, oracle_of(engine.config))
    result.routing.array[:] = 0


# -- looking in ---------------------------------------------------------------------------------------


async def test_stats_count():
    async with synthetic_engine(synthetic_config(pipeline_depth=1)) as engine:
        await ask(engine)
        stats = engine.stats()
        assert (stats.state, stats.live, stats.waiting_for_place, stats.steps_in_flight) == ("running", 0, 0, 0)
        counters = stats.scheduler
        assert (counters.finished, counters.generated_tokens, counters.prompt_tokens, counters.hit_tokens) == (
            1,
            10,
            10,
            0,
        )
        assert counters.steps == 10
        assert counters.free_blocks + counters.idle_blocks == counters.num_blocks == 64
        # 10 + 10 - 1 positions: four whole blocks stay as cache
        assert counters.idle_blocks == 4


async def test_lateness_of_the_loop_is_reported():
    async with synthetic_engine() as engine:
        await asyncio.sleep(0.01)
        engine.stats()
        hold_up(0.25)
        await asyncio.sleep(0.12)
        assert engine.stats().loop_late_max_s > 0.1


async def test_a_trace_replays_to_the_same_actions(tmp_path):
    config = synthetic_config({"num_blocks": 16, "max_context_tokens": 64})
    async with synthetic_engine(config) as engine:
        params = SamplingParams(max_tokens=25, seed=1, n=2)
        await asyncio.gather(*[ask(engine, [number] * (3 + number), params) for number in range(6)])
        trace = engine.trace().encode()
        assert engine.trace().story(5)
    turns = len(trace.splitlines()) - 1
    assert turns > 25
    assert replay(trace) == turns
    lines = trace.splitlines()
    # a token that was another one takes the schedule elsewhere, or ends in other results
    at = max(number for number, line in enumerate(lines) if b'"finish"' in line)
    lines[at] = lines[at].replace(b'"length"', b'"stop"')
    with pytest.raises(InvariantBroken, match="replays to other actions"):
        replay(b"\n".join(lines))


async def test_a_trace_that_lost_its_beginning_is_refused():
    async with synthetic_engine(synthetic_config(trace_turns=3)) as engine:
        await ask(engine)
        with pytest.raises(ValueError, match="cannot replay"):
            replay(engine.trace().encode())
    async with synthetic_engine(synthetic_config(trace_turns=0)) as engine:
        with pytest.raises(ConfigError, match="trace_turns"):
            engine.trace()


async def test_taps_see_events_and_a_slow_one_loses_them_alone():
    async with synthetic_engine(synthetic_config(pipeline_depth=1)) as engine:
        steps, slow = engine.bus.subscribe(StepDone), engine.bus.subscribe(limit=2)
        await ask(engine)
        seen = [(await anext(steps)).step_id for _ in range(10)]
        assert seen == list(range(10))
        assert (slow.pending, slow.delivered) == (2, 0)
        assert slow.dropped > 0
        waiting = asyncio.create_task(anext(steps, None))
        await asyncio.sleep(0)
    # the end of the engine ends its taps
    assert await waiting is None


async def test_a_bias_reaches_the_runner_and_stays_as_it_was_given():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        bias = {7: 100.0}
        task = asyncio.create_task(engine.complete(PROMPT, SamplingParams(max_tokens=5, logit_bias=bias, n=2)))
        await faults.reached(0)
        bias.clear()
        faults.release()
        assert [sample.token_ids for sample in (await task).samples] == [(7,) * 5] * 2
        barred = dict.fromkeys(range(1, 100), -100.0)
        await ask(engine, params=SamplingParams(max_tokens=5, seed=1, logit_bias=barred, logprobs="both"))


async def test_a_wrong_key_of_the_runner_is_told_without_frames_of_the_engine():
    with pytest.raises(ConfigError, match=r"runner_config\.foo: is not a key that exists") as caught:
        async with Engine(EngineConfig(runner="synthetic", process="worker", runner_config={"foo": 3})):
            pass
    own = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if "/fdasync/" in frame.filename]
    assert own == ["__aenter__", "start"]
