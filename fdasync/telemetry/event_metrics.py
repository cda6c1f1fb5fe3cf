"""Counts events for Prometheus: counters and histograms by label values.

Plain dicts and lists: an observation takes a microsecond, no lock and no file (the client's own classes take a lock,
and write files where an environment variable says so). Every label has few values, whatever a store or a caller says.
Knows no engine. Called by `prometheus.py`, one object for each tap.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from fdasync.events.catalog import (
    BlockDamaged,
    BlocksReceived,
    BreakerChanged,
    ConnectionsRefused,
    FetchEnded,
    LeaseAnswered,
    LinkChanged,
    LookedUp,
    LoopHeldUp,
    RequestEnded,
    StoreCalled,
    StoreEnded,
    SwapDone,
    WeightsChanged,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.metrics_core import Metric

    from fdasync.events.catalog import Event

# buckets in seconds: of a token, a request, a transfer, a late loop
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LATE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_CALL_OUTCOMES = {
    "": "ok", "StoreTimeout": "timeout", "StoreUnavailable": "unavailable", "StoreBusy": "unavailable",
    "StoreRejected": "rejected",
}  # fmt: skip
# the checks of `DamagedBlock`; a store's own words must not become label values
_DAMAGES = frozenset([
    "magic", "version", "length", "header", "namespace", "key", "rank", "layout", "kv_dtype", "block_tokens",
    "sections", "checksum", "padding", "store",
])  # fmt: skip


class Family:
    """One metric.

    Attributes:
        name: in Prometheus' form.
        text: what it counts, for people.
        labels: names of its labels.
    """

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels


class Counter(Family):
    """Sums by label values. `add()` before the first event makes a series that starts at 0."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, text, labels)
        self._sums: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, value: float = 1.0, *labels: str) -> None:
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def export(self, common: tuple[str, ...], values: tuple[str, ...]) -> Metric:
        family = CounterMetricFamily(self.name, self.text, labels=(*common, *self.labels))
        for labels, value in list(self._sums.items()):
            family.add_metric((*values, *labels), value)
        return family


class Histogram(Family):
    """Observations by label values, in a bucket for each upper bound and one without a bound."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, text, labels)
        self._bounds = bounds
        self._marks = (*[f"{bound:g}" if bound % 1 else f"{bound:.1f}" for bound in bounds], "+Inf")
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._begin(())

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        self._sums[labels] = 0.0
        return self._counts.setdefault(labels, [0] * len(self._marks))

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels) or self._begin(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def export(self, common: tuple[str, ...], values: tuple[str, ...]) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=(*common, *self.labels))
        for labels, counts in list(self._counts.items()):
            total = 0
            buckets = []
            for mark, count in zip(self._marks, counts, strict=True):
                total += count
                buckets.append((mark, total))
            family.add_metric((*values, *labels), buckets, self._sums[labels])
        return family


class EventMetrics:
    """All metrics that are counted from events. `take` calls the one method for an event's class.

    Attributes:
        families: all counters and histograms.
        breakers: the state of each store's breaker, by the store's name, from its first event or call on.
        handlers: the method for each class of events.
    """

    def __init__(self) -> None:
        self.requests = Counter(
            "fdasync_requests_finished_total", "Ended requests, by reason; mixed: their samples differ.", ("reason",)
        )
        self.samples = Counter("fdasync_samples_finished_total", "Samples that ended, by reason.", ("reason",))
        self.ttft = Histogram("fdasync_time_to_first_token_seconds", "From a call to the first token.", _REQUEST_S)
        self.total = Histogram("fdasync_request_seconds", "From a call to the end of its request.", _REQUEST_S)
        self.token = Histogram(
            "fdasync_time_per_output_token_seconds", "From a request's first token to its end, by each token.", _TOKEN_S
        )
        self.swap = Histogram("fdasync_swap_seconds", "Copies of blocks between device and host.", _TRANSFER_S)
        self.swap_kv = Counter("fdasync_swap_kv_bytes_total", "KV copied between device and host.")
        self.swap_aux = Counter("fdasync_swap_aux_bytes_total", "Rows copied with the KV: stays 0.")
        self.calls = Counter(
            "fdasync_store_calls_total", "Calls to the store, by outcome.", ("store", "verb", "outcome")
        )
        self.items = Counter(
            "fdasync_store_items_total", "Blocks or keys of answered calls, by outcome.", ("store", "verb", "outcome")
        )
        self.nbytes = Counter("fdasync_store_bytes_total", "Read from or written to the store.", ("store", "verb"))
        self.call = Histogram(
            "fdasync_store_call_seconds", "Calls that were answered or timed out.", _TRANSFER_S, ("store", "verb")
        )
        self.damaged = Counter(
            "fdasync_store_damaged_blocks_total", "Blocks that came back wrong, by check.", ("store", "reason")
        )
        self.openings = Counter("fdasync_store_breaker_openings_total", "The store was left alone.", ("store",))
        self.waits = Histogram(
            "fdasync_store_wait_seconds", "Whole lookups, fetches and writes of runs of blocks.", _TRANSFER_S, ("what",)
        )
        self.late_transfers = Counter(
            "fdasync_store_late_transfers_total", "Transfers whose wait ended before their work.", ("what",)
        )
        self.updates = Counter("fdasync_weight_updates_total", "Weight updates that succeeded.")
        self.held_up = Histogram(
            "fdasync_loop_held_up_seconds", "The engine's loop did not turn for so long (0.05 or more).", _LATE_S
        )
        self.asked = Counter(
            "fdasync_lease_requests_total", "Questions to decode instances for a lease, by answer.", ("answer",)
        )
        self.receive = Histogram("fdasync_receive_seconds", "Copies of some blocks from other instances.", _TRANSFER_S)
        self.received = Counter("fdasync_received_bytes_total", "KV and rows that came from other instances.")
        self.refused = Counter(
            "fdasync_connections_refused_total", "Connections without the fleet's keys that were refused.", ("reason",)
        )
        self.lost = Counter("fdasync_links_lost_total", "Links to other instances that were lost.", ("role",))
        for answer in ("granted", "denied", "silent"):
            self.asked.add(0.0, answer)
        for what in ("fetch", "write"):
            self.late_transfers.add(0.0, what)
        self.breakers: dict[str, str] = {}
        self.families: tuple[Counter | Histogram, ...] = tuple(
            [value for value in vars(self).values() if isinstance(value, Counter | Histogram)]
        )
        self.handlers: dict[type[Event], Callable[[Any], None]] = {
            RequestEnded: self._request_ended,
            SwapDone: self._swapped,
            StoreCalled: self._store_called,
            BlockDamaged: self._block_damaged,
            BreakerChanged: self._breaker_changed,
            LookedUp: self._looked_up,
            FetchEnded: self._fetch_ended,
            StoreEnded: self._store_ended,
            WeightsChanged: self._weights_changed,
            LoopHeldUp: self._loop_held_up,
            LeaseAnswered: self._lease_answered,
            BlocksReceived: self._blocks_received,
            LinkChanged: self._link_changed,
            ConnectionsRefused: self._refused,
        }

    def take(self, event: Event) -> None:
        self.handlers[type(event)](event)

    def _request_ended(self, event: RequestEnded) -> None:
        reasons = set(event.reasons)
        self.requests.add(1.0, "failed" if event.error else reasons.pop() if len(reasons) == 1 else "mixed")
        for reason in event.reasons:
            self.samples.add(1.0, reason)
        self.total.observe(event.total_s)
        if event.ttft_s is not None:
            self.ttft.observe(event.ttft_s)
            if len(event.reasons) == 1 and event.output_tokens > 1:
                self.token.observe((event.total_s - event.ttft_s) / (event.output_tokens - 1))

    def _swapped(self, event: SwapDone) -> None:
        self.swap.observe(event.seconds)
        self.swap_kv.add(event.kv_nbytes)
        self.swap_aux.add(event.aux_nbytes)

    def _store_called(self, event: StoreCalled) -> None:
        store, verb = event.store, event.verb
        self.calls.add(1.0, store, verb, _CALL_OUTCOMES.get(event.error, "error"))
        if event.error in ("", "StoreTimeout"):
            # a call that was refused, or failed at once, would make a store look fast
            self.call.observe(event.seconds, store, verb)
        if not event.error:
            self.nbytes.add(event.nbytes, store, verb)
            for outcome in ("done", "missed", "damaged", "failed"):
                if count := getattr(event, outcome):
                    self.items.add(count, store, verb, outcome)
            if store not in self.breakers:
                # an answer shows that the breaker is closed; before the first answer its state is not known
                self._breaker(store, "closed")

    def _block_damaged(self, event: BlockDamaged) -> None:
        reason = event.problem.partition(":")[0]
        self.damaged.add(1.0, event.store, reason if reason in _DAMAGES else "other")

    def _breaker_changed(self, event: BreakerChanged) -> None:
        self._breaker(event.store, event.state)

    def _breaker(self, store: str, state: str) -> None:
        before = self.breakers.get(store)
        self.breakers[store] = state
        # a failed probe opens no breaker that was closed
        self.openings.add(float(state == "open" and before != "half_open"), store)

    def _looked_up(self, event: LookedUp) -> None:
        self.waits.observe(event.seconds, "lookup")

    def _fetch_ended(self, event: FetchEnded) -> None:
        self.waits.observe(event.seconds, "fetch")
        self.late_transfers.add(float(event.late), "fetch")

    def _store_ended(self, event: StoreEnded) -> None:
        self.waits.observe(event.seconds, "write")
        self.late_transfers.add(float(event.late), "write")

    def _weights_changed(self, event: WeightsChanged) -> None:
        del event
        self.updates.add()

    def _lease_answered(self, event: LeaseAnswered) -> None:
        self.asked.add(1.0, "granted" if event.granted else "silent" if event.silent else "denied")

    def _blocks_received(self, event: BlocksReceived) -> None:
        self.receive.observe(event.seconds)
        self.received.add(event.nbytes)

    def _link_changed(self, event: LinkChanged) -> None:
        if not event.up:
            self.lost.add(1.0, event.role)

    def _refused(self, event: ConnectionsRefused) -> None:
        self.refused.add(float(event.count), event.reason)

    def _loop_held_up(self, event: LoopHeldUp) -> None:
        self.held_up.observe(event.seconds)
