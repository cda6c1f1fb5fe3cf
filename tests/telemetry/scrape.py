"""What is read from a tap's exposition, and held against an engine's own figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from fdasync.engine.engine import Engine


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


def check_counters(scrape: Scrape, engine: Engine) -> None:
    """Every number that the engine's own counters have."""
    stats = engine.stats()
    counts = stats.scheduler
    assert {state for (state,), on in scrape.series("engine_state").items() if on} == {stats.state}
    same = {
        "paused": counts.paused,
        "requests_waiting_for_place": stats.waiting_for_place,
        "samples_live": stats.live, "samples_running": counts.running, "samples_waiting": counts.waiting,
        "steps_in_flight": stats.steps_in_flight, "steps_total": counts.steps, "preemptions_total": counts.preemptions,
        "late_aborts_total": counts.late_aborts, "prompt_tokens_total": counts.prompt_tokens,
        "generated_tokens_total": counts.generated_tokens, "overrun_tokens_total": counts.dropped_tokens,
        "swaps_in_flight": counts.moving, "store_fetched_blocks_total": counts.fetched_blocks,
        "store_late_fetched_blocks_total": counts.late_fetched_blocks,
        "store_written_blocks_total": counts.written_blocks, "store_dropped_writes_total": counts.dropped_writes,
        "store_fetch_cut_offs_total": counts.fetch_cut_offs, "store_writing_blocks": counts.writing,
        "store_waits": counts.waiting_for_store, "store_late_transfers_held": counts.late_transfers,
    }  # fmt: skip
    assert scrape.series("weight_version") == {(counts.weight_version,): 1.0}
    assert {name: scrape(name) for name in same} == {name: float(value) for name, value in same.items()}
    hits = scrape.series("hit_tokens_total")
    assert hits["host",] == counts.hit_tokens_host
    assert hits["store",] == counts.hit_tokens_store
    assert sum(hits.values()) == counts.hit_tokens
    # label values come in the order of the labels' names: state, tier
    blocks = scrape.series("kv_blocks")
    assert blocks["free", "device"] == counts.free_blocks
    assert blocks["idle", "device"] == counts.idle_blocks
    assert blocks["free", "host"] == counts.free_host_blocks
    assert blocks["used", "device"] == counts.num_blocks - counts.free_blocks - counts.idle_blocks
    assert blocks["used", "host"] == counts.num_host_blocks - counts.free_host_blocks
    assert scrape.series("evictions_total") == {
        ("device",): counts.evictions,
        ("host",): counts.host_evictions,
    }
    swapped = {("in",): counts.swapped_in_blocks, ("out",): counts.swapped_out_blocks}
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
