"""What Prometheus is told: every number is held against the engine's own counters, or against what a test counted."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fdasync import SamplingParams
from fdasync.drafting import Speculation
from fdasync.errors import ConfigError, EngineClosed, EngineFailed
from fdasync.events.catalog import BlockDamaged, LoopHeldUp, RequestEnded, StoreCalled
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import held_engine, run_sim, synthetic_config, synthetic_engine, until
from tests.support.helpers import hold_up
from tests.telemetry.scrape import Scrape, check_counters, check_histogram

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


# -- requests -----------------------------------------------------------------------------------------


async def test_ends_of_requests():
    engine, faults = held_engine(synthetic_config(max_requests=8))
    async with engine, PrometheusTap(engine) as tap, engine.bus.subscribe(RequestEnded) as ends:
        results = []
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0)) as stream:
            async for _ in stream:
                pass
        results.append(stream.result)
        results.append(await engine.complete([1, 2, 3] * 3, SamplingParams(max_tokens=3, seed=1, n=3)))
        faults.hold()
        call = asyncio.create_task(engine.complete([1, 2, 3, 4, 5], GREEDY, request_id="mine"))
        await until(lambda: engine.abort("mine"))
        results.append(await call)
        faults.release()
        # in the frontend, until its deadline
        blocker = engine.generate([1, 2, 3], SamplingParams(max_tokens=200, n=8))
        async with blocker:
            results.append(await engine.complete([1, 2, 3], GREEDY, deadline_s=0.02))
            assert results[-1].finish_reason == "deadline"
        await until(lambda: ends.pending == 5 and not tap.pending)
        scrape = Scrape(tap.exposition())
        told = [await anext(ends) for _ in range(5)]
    assert scrape.series("requests_finished_total") == {("length",): 2, ("abort",): 2, ("deadline",): 1}
    assert scrape.series("samples_finished_total") == {("length",): 4, ("abort",): 9, ("deadline",): 1}
    ttft = [event.ttft_s for event in told if event.ttft_s is not None]
    check_histogram(scrape, "time_to_first_token_seconds", ttft)
    check_histogram(scrape, "request_seconds", [event.total_s for event in told])
    first = results[0]
    check_histogram(scrape, "time_per_output_token_seconds", [(first.total_s - first.ttft_s) / 5])
    for event, result in zip([*told[:3], told[3]], results, strict=True):
        assert (event.request_id, event.total_s, event.ttft_s) == (result.request_id, result.total_s, result.ttft_s)
        assert event.reasons == tuple(sample.finish_reason for sample in result.samples)
        assert event.prompt_tokens == len(result.prompt_token_ids)
        assert event.output_tokens == sum(len(sample.token_ids) for sample in result.samples)
        assert event.cached[0] == sum(sample.cached.device for sample in result.samples)
    assert told[1].cached == (16, 0, 0), "two of three found what the first computed"
    assert told[1].group == 1
    assert told[3].group == -1, "it never came in"


def test_samples_that_end_differently():
    metrics = EventMetrics()
    ended = {"request_id": "r", "group": 0, "prompt_tokens": 1, "output_tokens": 8, "cached": (0, 0, 0)}
    metrics.take(RequestEnded(reasons=("stop", "length"), ttft_s=0.5, total_s=4.0, **ended))
    metrics.take(RequestEnded(reasons=("abort",), ttft_s=None, total_s=1.0, error="DecodeFailed", **ended))
    by_reason = {sample.labels["reason"]: sample.value for sample in metrics.requests.export((), ()).samples}
    assert by_reason == {"mixed": 1, "failed": 1}
    # time by token says nothing where several samples share it
    assert metrics.token.export((), ()).samples[-1].value == 0


async def test_a_failed_engine_says_so():
    engine, faults = held_engine()
    async with engine, PrometheusTap(engine) as tap:
        faults.hold()
        call = asyncio.create_task(engine.complete([1, 2, 3], GREEDY))
        await until(lambda: engine.stats().steps_in_flight > 0)
        engine._fail(OSError("the end"))
        with pytest.raises(EngineFailed):
            await call
        await until(lambda: not tap.pending)
        scrape = Scrape(tap.exposition())
        faults.release()
    assert scrape.series("requests_finished_total") == {("failed",): 1}
    assert scrape("engine_state", state="failed") == 1
    assert scrape("engine_state", state="running") == 0


async def test_numbers_stay_readable_after_the_engine():
    engine = synthetic_engine()
    await engine.start()
    async with PrometheusTap(engine) as tap:
        await engine.complete([1, 2, 3], GREEDY)
        await engine.aclose()
        scrape = Scrape(tap.exposition())
        check_counters(scrape, engine)
        assert scrape("engine_state", state="closed") == 1
        assert scrape("requests_finished_total", reason="length") == 1
    assert Scrape(tap.exposition()).values == {}, "the registry has lost its collector"


# -- weights, the loop --------------------------------------------------------------------------------


async def test_weights_and_pauses():
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        await engine.pause()
        scrape = Scrape(tap.exposition())
        assert (scrape("paused"), scrape("engine_state", state="paused")) == (1, 1)
        await engine.sleep(0)
        assert Scrape(tap.exposition())("engine_state", state="asleep") == 1
        await engine.wake()
        await engine.resume()
        assert Scrape(tap.exposition())("engine_state", state="running") == 1
        await engine.update_weights(7, [("weights", "uint64", (1,), bytes(8))])
        await until(lambda: not tap.pending)
        scrape = Scrape(tap.exposition())
        check_counters(scrape, engine)
        assert (scrape("paused"), scrape("weight_updates_total")) == (0, 1)
        assert scrape.series("weight_version") == {("7",): 1}


async def test_every_reader_hears_of_a_loop_that_was_held_up():
    async with synthetic_engine() as engine, PrometheusTap(engine) as one, PrometheusTap(engine) as two:
        async with engine.bus.subscribe(LoopHeldUp) as late:
            hold_up(0.25)
            event = await anext(late)
        assert event.seconds > 0.1
        await until(lambda: not one.pending and not two.pending)
        for tap in (one, two):
            scrape = Scrape(tap.exposition())
            assert scrape("loop_held_up_seconds_count") >= 1
            assert scrape("loop_held_up_seconds_sum") > 0.1


# -- taps ---------------------------------------------------------------------------------------------


async def test_two_engines_two_taps():
    async with (
        synthetic_engine() as one,
        synthetic_engine() as two,
        PrometheusTap(one, labels={"engine": "one"}) as first,
        PrometheusTap(two) as second,
    ):
        for _ in range(3):
            await one.complete([1, 2, 3], GREEDY)
        await two.complete([1, 2, 3, 4, 5], GREEDY)
        await until(lambda: not first.pending and not second.pending)
        ours, theirs = Scrape(first.exposition()), Scrape(second.exposition())
    assert ours("requests_finished_total", reason="length", engine="one") == 3
    assert theirs("requests_finished_total", reason="length") == 1
    assert ours("prompt_tokens_total", engine="one") == 9
    assert theirs("prompt_tokens_total") == 5
    assert all(("engine", "one") in labels for _, labels in ours.values)
    assert {name for name, _ in ours.values} == {name for name, _ in theirs.values}


async def test_a_registry_of_ones_own_takes_one_tap():
    registry = CollectorRegistry(auto_describe=True)
    async with synthetic_engine() as engine:
        async with PrometheusTap(engine, registry) as tap:
            assert tap.registry is registry
            with pytest.raises(ConfigError, match="registry"):
                async with PrometheusTap(engine, registry):
                    raise AssertionError("two collectors of the same names")
            await engine.complete([1, 2, 3], GREEDY)
        # it has let go of it, and so has the one that was refused
        async with PrometheusTap(engine, registry) as tap:
            assert Scrape(tap.exposition())("generated_tokens_total") == 4
            with pytest.raises(ConfigError, match="entered before"):
                await tap.__aenter__()
        assert engine.bus._taps == []


@pytest.mark.parametrize(
    "labels", [{"le": "x"}, {"store": "x"}, {"tier": "x"}, {"1a": "x"}, {"__name__": "x"}, {"a-b": "x"}, {"a": 3}]
)
async def test_labels_that_cannot_be(labels):
    async with synthetic_engine() as engine:
        with pytest.raises(ConfigError, match="label"):
            PrometheusTap(engine, labels=labels)


async def test_a_tap_needs_a_running_engine():
    with pytest.raises(EngineClosed):
        await PrometheusTap(synthetic_engine()).__aenter__()


async def _slow_tap() -> None:
    async with synthetic_engine() as engine, PrometheusTap(engine, limit=10) as tap:
        for _ in range(25):
            engine.bus.publish(BlockDamaged(store="s", key="k", problem="checksum: x"))
        await asyncio.sleep(0)
        await until(lambda: not tap.pending)
        scrape = Scrape(tap.exposition())
        assert tap.dropped == scrape("tap_dropped_events_total") == 15
        assert scrape("store_damaged_blocks_total", store="s", reason="checksum") == 10
        assert scrape("tap_events_total") == 10


def test_what_a_slow_tap_loses_is_counted():
    run_sim(_slow_tap())


async def test_a_full_queue_is_taken_in_turns():
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        for _ in range(1000):
            engine.bus.publish(BlockDamaged(store="s", key="k", problem="checksum: x"))
        pending = []
        while not pending or pending[-1]:
            await asyncio.sleep(0)
            if tap.pending or pending:
                pending.append(tap.pending)
        steps = [before - after for before, after in zip([1000, *pending], pending, strict=False)]
        assert max(steps) <= 256


async def test_a_tap_that_counts_no_more_does_not_pass_for_one_that_does():
    async with synthetic_engine() as engine:
        tap = await PrometheusTap(engine).__aenter__()
        engine.bus.publish(StoreCalled(store=["no name"], verb="put", items=1, nbytes=0, seconds=0.0))
        await until(lambda: tap._task.done())
        with pytest.raises(TypeError):
            tap.exposition()
        with pytest.raises(TypeError):
            await tap.__aexit__(None, None, None)
        assert engine.bus._taps == []
        # the engine goes on
        assert len((await engine.complete([1, 2, 3], GREEDY)).token_ids) == 4


async def test_snapshots_of_recurrent_state_are_counted():
    model = {"state_words": 2, "num_snapshots": 6}
    config = synthetic_config(model, host_blocks=8, host_snapshots=3)
    async with synthetic_engine(config) as engine, PrometheusTap(engine) as tap:
        for _ in range(2):
            await engine.complete(list(range(9)), GREEDY)
        numbers = engine.stats().scheduler
        text = tap.exposition().decode()
    assert numbers.resumed_snapshots == 1
    assert f'fdasync_snapshots_total{{outcome="taken"}} {numbers.taken_snapshots}.0' in text
    assert 'fdasync_snapshots_total{outcome="resumed"} 1.0' in text
    used = 6 - numbers.free_snapshots
    assert used > 0
    assert f'fdasync_snapshot_places{{state="used",tier="device"}} {used}.0' in text
    assert f'fdasync_snapshot_places{{state="free",tier="host"}} {numbers.free_host_snapshots}.0' in text


# -- the page -----------------------------------------------------------------------------------------


@pytest.fixture
def page() -> str:
    return DOCS.read_text()


async def test_every_metric_is_on_the_page(page):
    # those of the front are held by the plugin's own test
    rows = re.findall(r"^\| `((?:fdasync_(?!http_)|vllm:)\w+)` \| (\w+) \| ([^|]*?) \| [^|]+ \|$", page, re.MULTILINE)
    documented = {name: (kind, labels) for name, kind, labels in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    config = synthetic_config(speculation=Speculation())
    async with synthetic_engine(config) as engine, PrometheusTap(engine) as tap:
        described = {}
        for family in tap.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = family._labelnames
            described[name] = (family.type, ", ".join(f"`{label}`" for label in labels) or "-")
    assert documented == described


@pytest.mark.ci
async def test_the_example():
    example = Path(__file__).parents[2] / "examples" / "metrics.py"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(example), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(300):
        out, log = await child.communicate()
    assert child.returncode == 0, log.decode()
    assert b'fdasync_requests_finished_total{engine="example",reason="length"} 20.0' in out
    assert log.count(b'"event":"RequestEnded"') == 20
