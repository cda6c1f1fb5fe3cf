"""Prometheus metrics of one engine: counters and histograms from its events, gauges read at each scrape.

    async with Engine(config) as engine, PrometheusTap(engine) as metrics:
        port = await metrics.serve(9400)  # http://127.0.0.1:9400/metrics

A tap is a subscription behind a bounded queue: it never holds up the engine, and counts the events that it lost.
Numbers that the engine counts (tokens, blocks, hits, steps) are read from `engine.stats()` at the scrape and are exact;
`event_metrics.py` counts what only events tell (latencies, calls to the store). One registry per tap, no thread, no
module state: two engines do not meet. docs/metrics.md explains every metric.

A scrape reads `engine.stats()`, whose `loop_late_max_s` begins anew with each reader. Watch
`fdasync_loop_held_up_seconds` instead, which every reader sees whole.

Knows the engine by its public methods only. Made by users and by `fdasync serve`; `metrics_http.py` has the endpoint.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, TypeVar, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fdasync.errors import ConfigError, FdasyncError
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.metrics_http import ScrapeServer
from fdasync.telemetry.sight.sight import State
from fdasync.telemetry.vllm_names import vllm_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from fdasync.engine import Engine
    from fdasync.events.bus import Subscription

# the values of a metric's own labels
K = TypeVar("K", bound=tuple[str, ...])

STATES: Final[tuple[str, ...]] = get_args(State)
BREAKER_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}

# one number of `EngineStats` or of `SchedulerStats`: the metric's name, its text, the field
_ENGINE_GAUGES = (
    ("fdasync_requests_waiting_for_place", "Requests that wait for a place.", "waiting_for_place"),
    ("fdasync_samples_live", "Samples inside the engine.", "live"),
    ("fdasync_steps_in_flight", "Steps launched and not done.", "steps_in_flight"),
)
_SCHEDULER_GAUGES = (
    ("fdasync_paused", "1 while no steps are planned.", "paused"),
    ("fdasync_samples_running", "Samples that steps compute.", "running"),
    ("fdasync_samples_waiting", "Samples that wait to be computed.", "waiting"),
    ("fdasync_swaps_in_flight", "Copies between device and host, now.", "moving"),
    ("fdasync_store_writing_blocks", "Blocks being written, or queued for it.", "writing"),
    ("fdasync_store_waits", "Lookups and fetches in flight.", "waiting_for_store"),
    ("fdasync_store_late_transfers_held", "Late transfers that hold blocks.", "late_transfers"),
    ("fdasync_samples_leased", "Samples that other instances prefill for this one.", "leased"),
    ("fdasync_hand_offs", "Requests on their way to other instances.", "hand_offs"),
)
_SCHEDULER_COUNTERS = (
    ("fdasync_steps_total", "Steps that were planned.", "steps"),
    ("fdasync_preemptions_total", "Samples that gave their blocks up.", "preemptions"),
    ("fdasync_late_aborts_total", "Aborts of samples that had ended.", "late_aborts"),
    ("fdasync_prompt_tokens_total", "Prompt tokens of admitted samples.", "prompt_tokens"),
    ("fdasync_generated_tokens_total", "Tokens that were sampled.", "generated_tokens"),
    ("fdasync_overrun_tokens_total", "Tokens sampled after a sample's end, and dropped.", "dropped_tokens"),
    ("fdasync_store_fetched_blocks_total", "Blocks that came from the store in time.", "fetched_blocks"),
    ("fdasync_store_late_fetched_blocks_total", "Blocks that came from the store too late.", "late_fetched_blocks"),
    ("fdasync_store_written_blocks_total", "Blocks that the store took.", "written_blocks"),
    ("fdasync_store_dropped_writes_total", "Blocks that were not kept or written.", "dropped_writes"),
    ("fdasync_store_forgotten_blocks_total", "Blocks that the store should have had.", "forgotten_blocks"),
    ("fdasync_store_fetch_cut_offs_total", "Waits for the store that ended at their bound.", "fetch_cut_offs"),
    ("fdasync_received_blocks_total", "Blocks that came from other instances.", "received_blocks"),
)
# of an engine that drafts, and of a runner that does: their names in `SchedulerStats`
_DRAFTER_COUNTERS = (
    ("fdasync_drafted_tokens_total", "Drafts that the runner forwarded.", "drafted_tokens"),
    ("fdasync_accepted_tokens_total", "Drafts that equalled the sampled token.", "accepted_tokens"),
    ("fdasync_drafting_steps_total", "Steps that had drafts.", "drafting_steps"),
)

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TURN_EVENTS = 256


class PrometheusTap:
    """See the module. Enter it on the engine's loop once the engine runs; leave it before or after the engine's end.

    Args:
        engine: running. Its numbers stay readable when it has ended.
        registry: takes the tap's metrics; None: one of its own. One registry takes one tap.
        labels: put on every series, e.g. {"model": "qwen3"}. Raises ConfigError for a name that is no label or in use.
        limit: most events that wait to be counted; further events are dropped and counted.

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
        """Ends the endpoint and the counting. Raises the error that counting ended with."""
        assert self._events is not None
        assert self._task is not None
        server, self._server = self._server, None
        self._events.close()
        try:
            if server is not None:
                await server.aclose()
        finally:
            self.registry.unregister(self)
            # ends by itself: the subscription is closed, and holds a bounded number of events
            await self._task

    async def serve(self, port: int = 0, address: str = "127.0.0.1") -> int:
        """Answer GET /metrics at this address from now until the tap ends; returns the port (0: a free one).

        Raises ConfigError for an address that is not this machine's loopback, and for a port that is not free.
        """
        if self._server is not None or self._task is None:
            raise ConfigError("serve", "is called once, inside `async with`")
        server = self._server = ScrapeServer(self.exposition)
        try:
            return await server.open(address, port)
        except BaseException:
            self._server = None
            raise

    def exposition(self) -> bytes:
        """All that the registry holds, in Prometheus' text format. Raises the error that counting ended with."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()  # of a task that is done: a tap that stopped counting must not give old numbers
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
        yield from self._from_stats()
        for family in self._told.families:
            yield family.export(self._common, self._values)
        yield from self._under_vllms_names()
        states = {(store,): BREAKER_STATES[state] for store, state in self._told.breakers.items()}
        text = "0: the store is used, 1: it is tried, 2: it is left alone."
        yield self._gauge("fdasync_store_breaker_state", text, states, "store")
        assert self._events is not None
        yield self._counter("fdasync_tap_events_total", "Events that this tap counted.", {(): self._events.delivered})
        text = "Events that this tap lost, being slow."
        yield self._counter("fdasync_tap_dropped_events_total", text, {(): self._events.dropped})

    def _under_vllms_names(self) -> Iterator[Metric]:
        try:
            sight = self._engine.sight(past_picks=False)
        except FdasyncError:
            # of an engine that failed, the numbers above are left
            return
        common = dict(zip(self._common, self._values, strict=True))
        facts = self._engine.facts()
        yield from vllm_metrics([("engine", sight)], facts.model, facts.block_tokens, common)

    def _from_stats(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        numbers = stats.scheduler
        for name, text, field in _ENGINE_GAUGES:
            yield self._gauge(name, text, {(): getattr(stats, field)})
        for name, text, field in _SCHEDULER_GAUGES:
            yield self._gauge(name, text, {(): float(getattr(numbers, field))})
        for name, text, field in _SCHEDULER_COUNTERS:
            yield self._counter(name, text, {(): getattr(numbers, field)})
        drafters = [(own, name) for own, name in (("", numbers.drafter), ("own_", numbers.own_drafter)) if name]
        if drafters:
            for name, text, field in _DRAFTER_COUNTERS:
                counts = {(drafter,): getattr(numbers, own + field) for own, drafter in drafters}
                yield self._counter(name, text, counts, "drafter")
        # as in what `Engine.sight` shows
        now = stats.doing if stats.state == "running" else stats.state
        states = {(state,): float(state == now) for state in STATES}
        yield self._gauge("fdasync_engine_state", "1 for what the engine does.", states, "state")
        text = "1 for the label of the weights in use."
        yield self._gauge("fdasync_weight_version", text, {(numbers.weight_version,): 1.0}, "version")
        hits = {("host",): numbers.hit_tokens_host, ("store",): numbers.hit_tokens_store}
        hits["device",] = numbers.hit_tokens - sum(hits.values())
        text = "Prompt tokens that were not computed, by the tier that had them."
        yield self._counter("fdasync_hit_tokens_total", text, hits, "tier")
        blocks = {
            ("device", "used"): numbers.num_blocks - numbers.free_blocks - numbers.idle_blocks,
            ("device", "idle"): numbers.idle_blocks,
            ("device", "free"): numbers.free_blocks,
            ("host", "used"): numbers.num_host_blocks - numbers.free_host_blocks,
            ("host", "free"): numbers.free_host_blocks,
        }
        text = "KV blocks by tier; idle: cached, and no sample uses them."
        yield self._gauge("fdasync_kv_blocks", text, blocks, "tier", "state")
        evictions = {("device",): numbers.evictions, ("host",): numbers.host_evictions}
        yield self._counter("fdasync_evictions_total", "Blocks that made room, by tier.", evictions, "tier")
        swapped = {("in",): numbers.swapped_in_blocks, ("out",): numbers.swapped_out_blocks}
        yield self._counter("fdasync_swapped_blocks_total", "in: from host to device.", swapped, "direction")
        places = {
            ("device", "used"): numbers.num_snapshots - numbers.free_snapshots,
            ("device", "free"): numbers.free_snapshots,
            ("host", "used"): numbers.num_host_snapshots - numbers.free_host_snapshots,
            ("host", "free"): numbers.free_host_snapshots,
        }
        text = "Places for snapshots of recurrent state, by tier."
        yield self._gauge("fdasync_snapshot_places", text, places, "tier", "state")
        snapshots = {
            ("taken",): numbers.taken_snapshots,
            ("resumed",): numbers.resumed_snapshots,
            ("lost",): numbers.lost_snapshots,
            ("refused",): numbers.refused_snapshots,
        }
        yield self._counter("fdasync_snapshots_total", "What became of snapshots.", snapshots, "outcome")
        leases = {
            ("granted",): numbers.leases_granted,
            ("denied",): numbers.leases_denied,
            ("dropped",): numbers.leases_dropped,
        }
        yield self._counter("fdasync_leases_total", "Leases that were asked for here, by outcome.", leases, "state")

    def _gauge(self, name: str, text: str, values: Mapping[K, float], *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=(*self._common, *labels))
        for own, value in values.items():
            family.add_metric((*self._values, *own), value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[K, float], *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=(*self._common, *labels))
        for own, value in values.items():
            family.add_metric((*self._values, *own), value)
        return family


def _labels(labels: Mapping[str, str], told: EventMetrics) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and values, checked. Raises ConfigError."""
    taken = {"le", "tier", "state", "direction", "version", "model_name", "finished_reason"}.union(
        *[family.labels for family in told.families]
    )
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken:
            raise ConfigError("labels", f"{name!r} cannot be a label", hint="a name of letters that no metric uses")
        if not isinstance(value, str):
            raise ConfigError("labels", f"the value of {name!r} is not a string")
    return tuple(labels), tuple(labels.values())
