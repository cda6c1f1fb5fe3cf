"""Prometheus metrics of one engine: counters and histograms from its events, gauges read at each scrape.

    async with Engine(config) as engine, PrometheusTap(engine) as metrics:
        port = await metrics.serve(9400)  # http://127.0.0.1:9400/metrics

A tap is a subscription behind a bounded queue: it never holds up the engine, and counts the events that it lost.
Numbers that the engine counts (tokens, blocks, hits, steps) are read from `engine.stats()` at the scrape and are exact
(`stats_metrics.py`); `event_metrics.py` counts what only events tell (latencies, calls to the store). One registry per
tap, no thread, no module state: two engines do not meet. docs/metrics.md explains every metric.

Knows the engine by its public methods only. Made by users and by `fdasync serve`; `metrics_http.py` has the endpoint.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fdasync.errors import ConfigError, FdasyncError
from fdasync.telemetry.event_metrics import EventMetrics
from fdasync.telemetry.metrics_http import ScrapeServer
from fdasync.telemetry.stats_metrics import LABELS, stats_metrics
from fdasync.telemetry.vllm_names import vllm_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from fdasync.engine import Engine
    from fdasync.events.bus import Subscription

BREAKER_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}

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
        yield from stats_metrics(self._common, [(self._values, self._engine.stats())])
        for family in self._told.families:
            yield family.export(self._common, self._values)
        yield from self._under_vllms_names()
        text = "0: the store is used, 1: it is tried, 2: it is left alone."
        breakers = GaugeMetricFamily("fdasync_store_breaker_state", text, labels=(*self._common, "store"))
        for store, state in self._told.breakers.items():
            breakers.add_metric((*self._values, store), BREAKER_STATES[state])
        yield breakers
        assert self._events is not None
        for name, text, count in (
            ("fdasync_tap_events_total", "Events that this tap counted.", self._events.delivered),
            ("fdasync_tap_dropped_events_total", "Events that this tap lost, being slow.", self._events.dropped),
        ):
            counter = CounterMetricFamily(name, text, labels=self._common)
            counter.add_metric(self._values, count)
            yield counter

    def _under_vllms_names(self) -> Iterator[Metric]:
        try:
            sight = self._engine.sight(past_picks=False)
        except FdasyncError:
            # of an engine that failed, the numbers above are left
            return
        common = dict(zip(self._common, self._values, strict=True))
        facts = self._engine.facts()
        yield from vllm_metrics([("engine", sight)], facts.model, facts.block_tokens, common)


def _labels(labels: Mapping[str, str], told: EventMetrics) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and values, checked. Raises ConfigError."""
    taken = {"le", "model_name", "finished_reason", *LABELS}.union(*[family.labels for family in told.families])
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken:
            raise ConfigError("labels", f"{name!r} cannot be a label", hint="a name of letters that no metric uses")
        if not isinstance(value, str):
            raise ConfigError("labels", f"the value of {name!r} is not a string")
    return tuple(labels), tuple(labels.values())
