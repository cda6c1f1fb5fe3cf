"""What Prometheus is told: every number is held against the engine's own books, or against what a test counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from fdasync import ConfigError, EngineClosed, EngineFailed, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cache.store.wrappers import FaultyStore, StoreFaults
from fdasync.engine.engine import Engine
from fdasync.events.catalog import (
    BlockDamaged,
    BreakerChanged,
    FetchEnded,
    LoopHeldUp,
    RequestEnded,
    StoreCalled,
    StoreEnded,
    SwapDone,
)
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.metrics_http import ScrapeServer
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import held_engine, run_sim, synthetic_config, synthetic_engine, until

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"


class Scrape:
    """What an exposition says, by name and labels."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }
        assert len(self.values) == sum(len(family.samples) for family in self.families), "a series stands there twice"

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"fdasync_{name}", frozenset(labels.items())]

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """All series of this name, by the values of their labels in the order of the labels' names."""
        return {
            tuple(value for _, value in sorted(labels)): number
            for (found, labels), number in self.values.items()
            if found == f"fdasync_{name}"
        }


def tiers_config(**values):
    """A device and a host so small that the store is needed; steps of 0.1 s make fetching worth while."""
    runner = {"num_blocks": 16, "step_s": 0.1, "max_context_tokens": 64}
    defaults = {"host_blocks": 16, "store": "memory", "max_running": 2, "store_retry_s": 1.0, "lease_kill_s": 8.0}
    return synthetic_config(runner, **{**defaults, **values})


def prompt(number: int) -> list[int]:
    return [number] * 40


async def settled(engine: Engine, tap: PrometheusTap) -> None:
    """Everything is counted, and nothing is under way that is still to be told."""
    async with asyncio.timeout(60):
        while (books := engine.stats().scheduler).writing or books.moving or tap.pending:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def check_books(scrape: Scrape, engine: Engine) -> None:
    """Every number that the engine's own books have."""
    stats = engine.stats()
    books = stats.scheduler
    assert {state for (state,), on in scrape.series("engine_state").items() if on} == {stats.state}
    same = {
        "paused": books.paused, "weight_version": books.weight_version, "requests_at_the_door": stats.at_the_door,
        "samples_live": stats.live, "samples_running": books.running, "samples_waiting": books.waiting,
        "steps_in_flight": stats.steps_in_flight, "steps_total": books.steps, "preemptions_total": books.preemptions,
        "late_aborts_total": books.late_aborts, "prompt_tokens_total": books.prompt_tokens,
        "generated_tokens_total": books.generated_tokens, "overrun_tokens_total": books.dropped_tokens,
        "swaps_in_flight": books.moving, "store_fetched_blocks_total": books.fetched_blocks,
        "store_late_fetched_blocks_total": books.late_fetched_blocks,
        "store_written_blocks_total": books.written_blocks, "store_dropped_writes_total": books.dropped_writes,
        "store_fetch_cut_offs_total": books.fetch_cut_offs, "store_writing_blocks": books.writing,
        "store_waits": books.waiting_for_store, "store_late_leases": books.late_leases,
    }  # fmt: skip
    assert {name: scrape(name) for name in same} == {name: float(value) for name, value in same.items()}
    hits = scrape.series("hit_tokens_total")
    assert hits["host",] == books.hit_tokens_host
    assert hits["store",] == books.hit_tokens_store
    assert sum(hits.values()) == books.hit_tokens
    # label values come in the order of the labels' names: state, tier
    blocks = scrape.series("kv_blocks")
    assert blocks["free", "device"] == books.free_blocks
    assert blocks["idle", "device"] == books.idle_blocks
    assert blocks["free", "host"] == books.free_host_blocks
    assert blocks["used", "device"] == books.num_blocks - books.free_blocks - books.idle_blocks
    assert blocks["used", "host"] == books.num_host_blocks - books.free_host_blocks
    assert scrape.series("evictions_total") == {("device",): books.evictions, ("host",): books.host_evictions}
    swapped = {("in",): books.swapped_in_blocks, ("out",): books.swapped_out_blocks}
    assert scrape.series("swapped_blocks_total") == swapped


def check_histogram(scrape: Scrape, name: str, values: list[float], **labels: str) -> None:
    """Its count, its sum, and each of its buckets, are those of these values."""
    assert scrape(f"{name}_count", **labels) == len(values)
    assert scrape(f"{name}_sum", **labels) == pytest.approx(sum(values))
    buckets = {
        dict(found)["le"]: number
        for (full, found), number in scrape.values.items()
        if full == f"fdasync_{name}_bucket" and set(labels.items()) < found
    }
    assert len(buckets) > 5
    for bound, number in buckets.items():
        assert number == sum(value <= float(bound) for value in values), f"{name} up to {bound}"


# -- a store that does everything wrong ---------------------------------------------------------------


async def _bad_days(results: dict[str, Scrape]) -> None:
    memory = MemoryStore(MemoryConfig())
    faults = FaultyStore(memory, StoreFaults())
    engine = Engine(tiers_config(), store=faults)
    async with engine, PrometheusTap(engine) as tap, engine.bus.subscribe(limit=1 << 20) as seen:
        asked = []

        async def ask(number: int) -> None:
            asked.append(await engine.complete(prompt(number), GREEDY))

        await ask(0)
        await settled(engine, tap)
        assert 0 < engine.stats().scheduler.free_host_blocks < 16
        check_books(Scrape(tap.exposition()), engine)
        for number in range(1, 6):
            await ask(number)
        await ask(0)
        assert asked[-1].cached.store > 0
        await settled(engine, tap)

        # every object is zeros from now on; what was found so is gone, or was written again, whole
        before = dict(memory._objects)
        zeros = {key: bytes(len(value)) for key, value in before.items()}
        memory._objects = dict(zeros)
        await ask(1)
        assert asked[-1].cached.total == 0
        await settled(engine, tap)
        damaged = sum(memory._objects.get(key) != value for key, value in zeros.items())
        memory._objects = before
        results["damaged"] = Scrape(tap.exposition())
        assert results["damaged"].series("store_damaged_blocks_total") == {("magic", "memory"): damaged}
        assert damaged > 1

        # it hangs: one call that does not answer opens the breaker, and what was begun keeps its blocks
        faults.plan = StoreFaults(hang=1.0)
        for number in (2, 3, 4):
            await ask(number)
        cut_offs = engine.stats().scheduler.fetch_cut_offs
        assert cut_offs > 0
        async with asyncio.timeout(60):
            while Scrape(tap.exposition()).series("store_breaker_state") != {("memory",): 2}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        results["open"] = Scrape(tap.exposition())
        async with asyncio.timeout(60):
            while not Scrape(tap.exposition())("store_late_leases"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        check_books(Scrape(tap.exposition()), engine)
        await ask(5)
        faults.plan = StoreFaults()
        await asyncio.sleep(10)
        await settled(engine, tap)
        results["closed"] = last = Scrape(tap.exposition())
        check_books(last, engine)
        assert last("store_dropped_writes_total") > 0
        assert last("store_fetch_cut_offs_total") >= cut_offs

        # it fails: three calls in a row
        faults.plan = StoreFaults(fail_call=1.0)
        for number in range(6, 12):
            await ask(number)
        faults.plan = StoreFaults()
        await asyncio.sleep(10)
        await settled(engine, tap)
        results["last"] = last = Scrape(tap.exposition())
        check_books(last, engine)

        events = [await anext(seen) for _ in range(seen.pending)]
        check_events(last, events)
        assert last("store_breaker_openings_total", store="memory") == 2
        assert last("store_breaker_state", store="memory") == 0
        assert last("store_calls_total", store="memory", verb="exists_prefix", outcome="timeout") > 0
        assert last("store_calls_total", store="memory", verb="put", outcome="unavailable") > 0
        assert last("tap_dropped_events_total") == 0
        assert last("swap_aux_bytes_total") == 0

        # and what requests were told
        assert last("requests_finished_total", reason="length") == len(asked)
        hits = last.series("hit_tokens_total")
        assert hits == {
            (tier,): sum(getattr(result.cached, tier) for result in asked) for tier in ("device", "host", "store")
        }
        assert last("prompt_tokens_total") == sum(len(result.prompt_token_ids) for result in asked)
        assert last("generated_tokens_total") == sum(len(result.token_ids) for result in asked)


def check_events(scrape: Scrape, events: list) -> None:
    """Every number that only events tell, counted again."""

    def of(kind):
        return [event for event in events if isinstance(event, kind)]

    outcomes = {"": "ok", "StoreTimeout": "timeout", "StoreUnavailable": "unavailable"}
    calls = of(StoreCalled)
    # by the names of the labels: outcome, store, verb
    assert scrape.series("store_calls_total") == Counter((outcomes[one.error], one.store, one.verb) for one in calls)
    items = Counter()
    nbytes = Counter()
    for call in calls:
        items += Counter({(how, call.store, call.verb): getattr(call, how) for how in ("done", "missed", "failed")})
        items += Counter({("damaged", call.store, call.verb): call.damaged})
        nbytes[call.store, call.verb] += call.nbytes
    assert scrape.series("store_items_total") == items
    assert scrape.series("store_bytes_total") == nbytes
    assert nbytes["memory", "get_into"] > 0
    for verb in {call.verb for call in calls}:
        seconds = [one.seconds for one in calls if one.verb == verb and one.error in ("", "StoreTimeout")]
        check_histogram(scrape, "store_call_seconds", seconds, store="memory", verb=verb)
    check_histogram(scrape, "swap_seconds", [one.seconds for one in of(SwapDone)])
    assert scrape("swap_kv_bytes_total") == sum(one.kv_nbytes for one in of(SwapDone)) > 0
    for what, kind in (("fetch", FetchEnded), ("write", StoreEnded)):
        check_histogram(scrape, "store_wait_seconds", [one.seconds for one in of(kind)], what=what)
        assert scrape("store_leases_total", what=what) == sum(one.late for one in of(kind))
    assert scrape("store_leases_total", what="write") > 0
    assert sum(scrape.series("store_damaged_blocks_total").values()) == len(of(BlockDamaged))
    check_histogram(scrape, "request_seconds", [one.total_s for one in of(RequestEnded)])


def test_a_stores_bad_days_are_counted():
    results: dict[str, Scrape] = {}
    run_sim(_bad_days(results))
    assert results["damaged"]("store_breaker_state", store="memory") == 0
    assert results["damaged"]("store_breaker_openings_total", store="memory") == 0
    assert results["open"]("store_breaker_openings_total", store="memory") == 1
    assert results["closed"]("store_breaker_openings_total", store="memory") == 1
    assert results["closed"]("store_breaker_state", store="memory") == 0


def test_a_probe_that_fails_is_no_opening():
    metrics = EventMetrics()
    seen = []
    for state in ("open", "half_open", "open", "half_open", "closed", "open", "half_open", "closed"):
        metrics.take(BreakerChanged(store="s", state=state, problem=""))
        (opened,) = metrics.openings.export((), ()).samples
        seen.append((int(opened.value), metrics.breakers["s"]))
    assert [count for count, _ in seen] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert seen[-1][1] == "closed"


def test_a_breakers_state_is_not_guessed():
    """A tap that came late knows nothing before a call was answered, or the state changed."""
    metrics = EventMetrics()
    refused = StoreCalled(store="s", verb="put", items=1, nbytes=0, seconds=0.0, error="StoreUnavailable")
    metrics.take(refused)
    assert metrics.breakers == {}
    metrics.take(BreakerChanged(store="s", state="open", problem=""))
    metrics.take(StoreCalled(store="s", verb="put", items=1, nbytes=0, seconds=0.0, done=1))
    assert metrics.breakers == {"s": "open"}, "an answer to an old call closes no breaker"


def test_labels_stay_few_whatever_a_store_says():
    metrics = EventMetrics()
    for number in range(100):
        metrics.take(BlockDamaged(store="s", key="k", problem=f"my own words {number}: bad"))
        metrics.take(StoreCalled(store="s", verb="put", items=1, nbytes=0, seconds=0.0, error=f"Error{number}"))
    metrics.take(BlockDamaged(store="s", key="k", problem="checksum: section 'kv' is not what was written"))
    assert {sample.labels["reason"]: sample.value for sample in metrics.damaged.export((), ()).samples} == {
        "other": 100,
        "checksum": 1,
    }
    assert [sample.labels["outcome"] for sample in metrics.calls.export((), ()).samples] == ["error"]


# -- requests -----------------------------------------------------------------------------------------


async def test_ends_of_requests():
    engine, edge = held_engine(synthetic_config(max_requests=8))
    async with engine, PrometheusTap(engine) as tap, engine.bus.subscribe(RequestEnded) as ends:
        results = []
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0)) as stream:
            async for _ in stream:
                pass
        results.append(stream.result)
        results.append(await engine.complete([1, 2, 3] * 3, SamplingParams(max_tokens=3, seed=1, n=3)))
        edge.hold()
        call = asyncio.create_task(engine.complete([1, 2, 3, 4, 5], GREEDY, request_id="mine"))
        await until(lambda: engine.abort("mine"))
        results.append(await call)
        edge.release()
        # at the door, until its deadline
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
    engine, edge = held_engine()
    async with engine, PrometheusTap(engine) as tap:
        edge.hold()
        call = asyncio.create_task(engine.complete([1, 2, 3], GREEDY))
        await until(lambda: engine.stats().steps_in_flight > 0)
        engine._fail(OSError("the end"))
        with pytest.raises(EngineFailed):
            await call
        await until(lambda: not tap.pending)
        scrape = Scrape(tap.exposition())
        edge.release()
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
        check_books(scrape, engine)
        assert scrape("engine_state", state="closed") == 1
        assert scrape("requests_finished_total", reason="length") == 1
    assert Scrape(tap.exposition()).values == {}, "the registry has lost its collector"


# -- weights, the loop --------------------------------------------------------------------------------


async def test_weights_and_pauses():
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        await engine.pause()
        assert Scrape(tap.exposition())("paused") == 1
        await engine.resume()
        await engine.update_weights(7, [("weights", "uint64", (1,), bytes(8))])
        await until(lambda: not tap.pending)
        scrape = Scrape(tap.exposition())
        check_books(scrape, engine)
        assert (scrape("paused"), scrape("weight_version"), scrape("weight_updates_total")) == (0, 7, 1)


async def test_every_reader_hears_of_a_loop_that_was_held_up():
    async with synthetic_engine() as engine, PrometheusTap(engine) as one, PrometheusTap(engine) as two:
        async with engine.bus.subscribe(LoopHeldUp) as late:
            end = time.perf_counter() + 0.25
            while time.perf_counter() < end:
                pass
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


# -- the endpoint -------------------------------------------------------------------------------------


async def talk(port: int, data: bytes, host: str = "127.0.0.1") -> bytes:
    """Send, then read to the end of the connection."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def get(path: str = "/metrics", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.both_loops
async def test_a_scrape():
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        await engine.complete([1, 2, 3], GREEDY)
        await until(lambda: not tap.pending)
        port = await tap.serve()
        answer = await talk(port, get())
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert body == tap.exposition()
        check_books(Scrape(body), engine)
        # as a scraper asks that is configured with parameters
        assert (await talk(port, get("/metrics?name=x"))).startswith(b"HTTP/1.1 200 OK")
        assert (await talk(port, get(method="HEAD"))).split(b"\r\n\r\n", 1) == [head, b""]
        assert threading.active_count() == 1
        with pytest.raises(ConfigError, match="once"):
            await tap.serve()
    with pytest.raises(OSError, match=r".*"):
        await talk(port, get())


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/metrics/x"), 404),
        (get("//metrics"), 404),
        (get(method="POST"), 405),
        (get(method="get"), 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\x00\xff\xfe \x01\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * 9000, 431),
    ],
)
async def test_bad_requests(request_, status):
    def never():
        raise AssertionError("nobody asked for it")

    server = ScrapeServer(never)
    port = await server.open("127.0.0.1", 0)
    answer = await talk(port, request_)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in answer
    assert server.answered == {status: 1}
    await server.aclose()
    await server.aclose()


async def test_content_that_cannot_be_made_is_a_500():
    def broken():
        raise OSError("private words")

    server = ScrapeServer(broken)
    port = await server.open("127.0.0.1", 0)
    answer = await talk(port, get())
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error: OSError\r\n")
    assert b"private" not in answer
    await server.aclose()


@pytest.mark.both_loops
@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX", b"GET /metrics HTTP/1.1\n\n"])
async def test_a_client_that_does_not_ask_is_left(sent):
    server = ScrapeServer(lambda: b"", connection_s=0.05)
    port = await server.open("127.0.0.1", 0)
    # it ends: with a reset, or with nothing
    with contextlib.suppress(ConnectionResetError):
        assert await talk(port, sent) == b""
    assert server.answered == {}
    await server.aclose()


@pytest.mark.both_loops
async def test_a_client_that_does_not_take_its_answer_is_left():
    server = ScrapeServer(lambda: bytes(64 << 20), connection_s=0.1)
    port = await server.open("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(get())
    await until(lambda: server.answered == {200: 1})
    await until(lambda: not server._clients)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(64 << 20)
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
    await server.aclose()


@pytest.mark.both_loops
async def test_a_client_that_leaves_is_nobodys_error():
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    server = ScrapeServer(lambda: bytes(16 << 20))
    port = await server.open("127.0.0.1", 0)
    for sent in (b"", b"GET /me", get()):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await until(lambda: len(server._clients) == 1)
        writer.transport.abort()
        await until(lambda: not server._clients)
    await server.aclose()
    assert errors == []


@pytest.mark.both_loops
async def test_too_many_clients_at_a_time():
    server = ScrapeServer(lambda: b"x\n")
    port = await server.open("127.0.0.1", 0)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
    await until(lambda: len(server._clients) == 16)
    with contextlib.suppress(ConnectionResetError):
        assert await talk(port, get()) == b""
    # one leaves, and there is room again
    idle[0][1].close()
    await until(lambda: len(server._clients) == 15)
    assert (await talk(port, get())).endswith(b"x\n")
    # closing does not wait for those who stay
    async with asyncio.timeout(2):
        await server.aclose()
    for _, writer in idle:
        writer.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "10.1.2.3", "::ffff:127.0.0.1", "8.8.8.8"])
async def test_it_listens_on_the_loopback_only(host):
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        with pytest.raises(ConfigError, match=re.escape(f"{host} is not the loopback")):
            await tap.serve(0, host)
        # a refusal is not the end of it
        assert await tap.serve(0) > 0


@pytest.mark.parametrize(("host", "port"), [("localhost", 0), ("", 0), ("127.0.0.1", -1), ("127.0.0.1", 1 << 16)])
async def test_addresses_that_are_none(host, port):
    with pytest.raises(ConfigError, match=r"host|port"):
        await ScrapeServer(bytes).open(host, port)


async def test_an_address_that_is_taken():
    first, second = ScrapeServer(lambda: b""), ScrapeServer(lambda: b"")
    port = await first.open("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await second.open("127.0.0.1", port)
    # the server ends it, so it lingers
    await talk(port, get())
    await first.aclose()
    assert await second.open("127.0.0.1", port) == port
    await second.aclose()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
async def test_ipv6():
    server = ScrapeServer(lambda: b"x\n")
    try:
        port = await server.open("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    assert (await talk(port, get(), "::1")).endswith(b"x\n")
    await server.aclose()


# -- the page -----------------------------------------------------------------------------------------


@pytest.fixture
def page() -> str:
    return DOCS.read_text()


async def test_every_metric_is_on_the_page(page):
    rows = re.findall(r"^\| `(fdasync_\w+)` \| (\w+) \| ([^|]*?) \| [^|]+ \|$", page, re.MULTILINE)
    documented = {name: (kind, labels) for name, kind, labels in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        described = {}
        for family in tap.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = family._labelnames
            described[name] = (family.type, ", ".join(f"`{label}`" for label in labels) or "-")
    assert documented == described


async def test_the_example():
    example = Path(__file__).parent.parent / "examples" / "metrics.py"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(example), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, log = await child.communicate()
    assert child.returncode == 0, log.decode()
    assert b'fdasync_requests_finished_total{engine="example",reason="length"} 20.0' in out
    assert log.count(b'"event":"RequestEnded"') == 20
