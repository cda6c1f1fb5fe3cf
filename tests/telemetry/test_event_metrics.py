"""What a store's bad days add up to in metrics: every number is held against events that a test counted."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fdasync import SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.engine.engine import Engine
from fdasync.events.catalog import (
    BlockDamaged,
    BreakerChanged,
    FetchEnded,
    RequestEnded,
    StoreCalled,
    StoreEnded,
    SwapDone,
)
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import run_sim, synthetic_config
from fdasync.testing.stores.faults import FaultyStore, StoreFaults
from tests.telemetry.scrape import Scrape, check_counters, check_histogram

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def tiers_config(**values):
    """A device and a host so small that the store is needed; steps of 0.1 s make fetching worth while."""
    runner = {"num_blocks": 16, "step_s": 0.1, "max_context_tokens": 64}
    defaults = {
        "host_blocks": 16,
        "store": "memory",
        "max_running": 2,
        "store_retry_s": 1.0,
        "store_deadline_s": 5.0,
        "store_kill_s": 8.0,
    }
    return synthetic_config(runner, **{**defaults, **values})


def prompt(number: int) -> list[int]:
    return [number] * 40


async def settled(engine: Engine, tap: PrometheusTap) -> None:
    """Everything is counted, and nothing is under way that is still to be told."""
    async with asyncio.timeout(60):
        while (counters := engine.stats().scheduler).writing or counters.moving or tap.pending:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
        check_counters(Scrape(tap.exposition()), engine)
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
            while not Scrape(tap.exposition())("store_late_transfers_held"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        check_counters(Scrape(tap.exposition()), engine)
        await ask(5)
        faults.plan = StoreFaults()
        await asyncio.sleep(10)
        await settled(engine, tap)
        results["closed"] = last = Scrape(tap.exposition())
        check_counters(last, engine)
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
        check_counters(last, engine)

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
        assert scrape("store_late_transfers_total", what=what) == sum(one.late for one in of(kind))
    assert scrape("store_late_transfers_total", what="write") > 0
    assert sum(scrape.series("store_damaged_blocks_total").values()) == len(of(BlockDamaged))
    check_histogram(scrape, "request_seconds", [one.total_s for one in of(RequestEnded)])


@pytest.mark.ci
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
