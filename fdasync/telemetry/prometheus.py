"""Prometheus metrics of one engine: counters and histograms from its events, gauges read when somebody asks.

    async with Engine(config) as engine, PrometheusTap(engine) as metrics:
        port = await metrics.serve(9400)  # http://127.0.0.1:9400/metrics

A tap is a subscription behind a bounded queue: it never holds up the engine, and what it lost it counts. What the
engine's own books count (tokens, blocks, hits, steps) is read from `engine.stats()` at the scrape and is exact; what
only events tell (latencies, calls to the store) is counted by `event_metrics.py`. One registry per tap, no thread, no
module state: two engines do not meet. docs/metrics.md explains every metric.

A scrape reads `engine.stats()`, whose `loop_late_max_s` begins anew with each reader: watch
`fdasync_loop_held_up_seconds` instead, which the engine's own watch tells to everybody.

Made by users; knows the engine by its public face only. `metrics_http.py` has the endpoint.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fdasync.errors import ConfigError
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.metrics_http import ScrapeServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from fdasync.engine.engine import Engine
    from fdasync.events.bus import Subscription

STATES: Final = ("running", "draining", "closing", "closed", "failed")
BREAKER_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TURN_EVENTS = 256


class PrometheusTap:
    """See the module. Enter it on the engine's loop once the engine runs; leave it before or after the engine's end.

    Args:
        engine: running. Its numbers stay readable when it has ended.
        registry: where the collector stands; None: one of its own. One registry takes one tap.
        labels: put on every series, e.g. {"model": "qwen3"}. Raises ConfigError for a name that is none or in use.
        limit: most events that wait to be counted; what comes beyond is dropped and counted.

    Attributes:
        registry: as given, or its own.
    """

    def __init__(
        self,
        engine: Engine,
        registry: CollectorRegistry | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int = 4096,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._engine = engine
        self._told = EventMetrics()
        self._common, self._values = _labels(labels or {}, self._told)
        self._limit = limit
        self._events: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._server: ScrapeServer | None = None

    async def __aenter__(self) -> PrometheusTap:
        """Raises EngineClosed before the engine's start, ConfigError if the registry has such a tap already."""
        if self._events is not None:
            raise ConfigError("tap", "was entered before", hint="make another one")
        events = self._engine.bus.subscribe(*self._told.handlers, limit=self._limit)
        self._events = events
        try:
            self.registry.register(self)
        except ValueError as error:
            events.close()
            raise ConfigError("registry", str(error), hint="give each engine's tap a registry of its own") from None
        self._task = asyncio.get_running_loop().create_task(self._consume(events), name="fdasync-metrics")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Ends the endpoint and the counting. Raises what went wrong while events were counted."""
        assert self._events is not None
        assert self._task is not None
        server, self._server = self._server, None
        self._events.close()
        try:
            if server is not None:
                await server.aclose()
        finally:
            self.registry.unregister(self)
            # ends by itself: the subscription is closed, and what it holds is bounded
            await self._task

    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Answer GET /metrics at this address from now until the tap ends; returns the port (0: a free one).

        Raises ConfigError for a host that is not this machine's loopback, and an address that is not free.
        """
        if self._server is not None or self._task is None:
            raise ConfigError("serve", "is called once, inside `async with`")
        server = self._server = ScrapeServer(self.exposition)
        try:
            return await server.open(host, port)
        except BaseException:
            self._server = None
            raise

    def exposition(self) -> bytes:
        """All that the registry holds, in Prometheus' text format. Raises what went wrong while events were counted."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()  # of a task that is done: a tap that counts no more must not pass for one that does
        return generate_latest(self.registry)

    @property
    def pending(self) -> int:
        """Events that are not counted yet."""
        return 0 if self._events is None else self._events.pending

    @property
    def dropped(self) -> int:
        """Events that were lost because too many waited."""
        return 0 if self._events is None else self._events.dropped

    async def _consume(self, events: Subscription) -> None:
        taken = 0
        async for event in events:
            self._told.take(event)
            taken += 1
            if not taken % _TURN_EVENTS:
                # a full queue must not become one long callback
                await asyncio.sleep(0)

    # -- for the registry ---------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Every metric, now. Called by the registry, on the engine's loop."""
        common, values = self._common, self._values
        yield from self._from_stats()
        for family in self._told.families:
            yield family.export(common, values)
        states = [((store,), BREAKER_STATES[state]) for store, state in self._told.breakers.items()]
        yield self._gauge(
            "fdasync_store_breaker_state", "0: the store is used, 1: it is tried, 2: it is left alone.", states, "store"
        )
        assert self._events is not None
        delivered, dropped = self._events.delivered, self._events.dropped
        yield self._counter("fdasync_tap_events_total", "Events that this tap counted.", delivered)
        yield self._counter("fdasync_tap_dropped_events_total", "Events that it lost, being slow.", dropped)

    def _from_stats(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        books = stats.scheduler
        gauge, counter = self._gauge, self._counter
        states = [((state,), float(state == stats.state)) for state in STATES]
        yield gauge("fdasync_engine_state", "1 for the state that the engine is in.", states, "state")
        yield gauge("fdasync_paused", "1 while no steps are planned.", [((), float(books.paused))])
        yield gauge("fdasync_weight_version", "The label of the weights in use.", [((), books.weight_version)])
        yield gauge("fdasync_requests_at_the_door", "Wait for a place.", [((), stats.at_the_door)])
        yield gauge("fdasync_samples_live", "Samples inside the engine.", [((), stats.live)])
        yield gauge("fdasync_samples_running", "Samples that steps compute.", [((), books.running)])
        yield gauge("fdasync_samples_waiting", "Samples that wait to be computed.", [((), books.waiting)])
        yield gauge("fdasync_steps_in_flight", "Launched and not done.", [((), stats.steps_in_flight)])
        yield counter("fdasync_steps_total", "Steps that were planned.", books.steps)
        yield counter("fdasync_preemptions_total", "Samples that gave their blocks up.", books.preemptions)
        yield counter("fdasync_late_aborts_total", "Aborts of what had ended.", books.late_aborts)
        yield counter("fdasync_prompt_tokens_total", "Of admitted samples.", books.prompt_tokens)
        yield counter("fdasync_generated_tokens_total", "Tokens that were sampled.", books.generated_tokens)
        yield counter("fdasync_overrun_tokens_total", "Sampled after the end, dropped.", books.dropped_tokens)
        hits = CounterMetricFamily(
            "fdasync_hit_tokens_total", "Prompt tokens that were not computed, by tier.", labels=(*self._common, "tier")
        )
        found = (books.hit_tokens_host, books.hit_tokens_store)
        for tier, count in zip(("device", "host", "store"), (books.hit_tokens - sum(found), *found), strict=True):
            hits.add_metric((*self._values, tier), count)
        yield hits
        device_used = books.num_blocks - books.free_blocks - books.idle_blocks
        blocks = [
            (("device", "used"), device_used),
            (("device", "idle"), books.idle_blocks),
            (("device", "free"), books.free_blocks),
            (("host", "used"), books.num_host_blocks - books.free_host_blocks),
            (("host", "free"), books.free_host_blocks),
        ]
        yield gauge("fdasync_kv_blocks", "KV blocks by tier; idle: cached, used by nobody.", blocks, "tier", "state")
        evictions = CounterMetricFamily(
            "fdasync_evictions_total", "Blocks that made room, by tier.", labels=(*self._common, "tier")
        )
        evictions.add_metric((*self._values, "device"), books.evictions)
        evictions.add_metric((*self._values, "host"), books.host_evictions)
        yield evictions
        swapped = CounterMetricFamily(
            "fdasync_swapped_blocks_total", "in: host to device.", labels=(*self._common, "direction")
        )
        swapped.add_metric((*self._values, "in"), books.swapped_in_blocks)
        swapped.add_metric((*self._values, "out"), books.swapped_out_blocks)
        yield swapped
        yield gauge("fdasync_swaps_in_flight", "Copies between device and host, now.", [((), books.moving)])
        fetched, late = books.fetched_blocks, books.late_fetched_blocks
        yield counter("fdasync_store_fetched_blocks_total", "Came from the store in time.", fetched)
        yield counter("fdasync_store_late_fetched_blocks_total", "Came from the store after all.", late)
        yield counter("fdasync_store_written_blocks_total", "The store took them.", books.written_blocks)
        yield counter("fdasync_store_dropped_writes_total", "Blocks that were not kept.", books.dropped_writes)
        yield counter("fdasync_store_forgotten_blocks_total", "Missing against belief.", books.forgotten_blocks)
        yield counter("fdasync_store_fetch_cut_offs_total", "Waits that ended at the bound.", books.fetch_cut_offs)
        yield gauge("fdasync_store_writing_blocks", "Being written, or queued for it.", [((), books.writing)])
        yield gauge("fdasync_store_waits", "Lookups and fetches in flight.", [((), books.waiting_for_store)])
        yield gauge("fdasync_store_late_leases", "Late transfers that hold blocks.", [((), books.late_leases)])
        yield gauge("fdasync_samples_leased", "Samples that others prefill for this one.", [((), books.leased)])
        yield gauge("fdasync_errands", "Requests on their way to other instances.", [((), books.errands)])
        leases = CounterMetricFamily(
            "fdasync_leases_total", "Room for requests of other instances, by what came of it.",
            labels=(*self._common, "state"),
        )  # fmt: skip
        counts = (books.leases_granted, books.leases_denied, books.leases_dropped)
        for state, count in zip(("granted", "denied", "dropped"), counts, strict=True):
            leases.add_metric((*self._values, state), count)
        yield leases
        yield counter("fdasync_received_blocks_total", "Came from other instances.", books.received_blocks)

    def _gauge(
        self, name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=(*self._common, *labels))
        for own, value in values:
            family.add_metric((*self._values, *own), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=self._common)
        family.add_metric(self._values, value)
        return family


def _labels(labels: Mapping[str, str], told: EventMetrics) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and values, checked. Raises ConfigError."""
    taken = {"le", "tier", "state", "direction"}.union(*[family.labels for family in told.families])
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken:
            raise ConfigError("labels", f"{name!r} cannot be a label", hint="a name of letters that no metric uses")
        if not isinstance(value, str):
            raise ConfigError("labels", f"the value of {name!r} is not a string")
    return tuple(labels), tuple(labels.values())
