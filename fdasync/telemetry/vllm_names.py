"""Metrics under vLLM's names, where theirs mean the same, so that dashboards and scalers made for vLLM read them.

Made of `Sight`s, one for each engine. Histograms have the bounds of `telemetry/sight/latencies.py`; vLLM's bounds
differ between its versions. Names whose meaning differs are left out, such as the time between two tokens, which nobody
measures here. Called by `prometheus.py` and by the HTTP front. docs/metrics.md lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from fdasync.telemetry.sight.latencies import NUM_BUCKETS, upper_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from fdasync.stats import EngineStats
    from fdasync.telemetry.sight.latencies import Counts
    from fdasync.telemetry.sight.sight import Sight

# every second bucket is told: a bound is 1.41 times the one before
_TOLD_EACH = 2
# reasons of ours by vLLM's; samples that ended differently, and requests that went elsewhere, have none
_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "deadline": "abort", "failed": "error"}

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Samples that hold blocks.", lambda one: one.scheduler.running),
    (
        "vllm:num_requests_waiting",
        "Samples that wait to be computed, and requests that wait for a place.",
        lambda one: one.scheduler.waiting + one.waiting_for_place,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Device blocks that samples use, of all; 1: all.",
        lambda one: one.scheduler.used_blocks / max(one.scheduler.num_blocks, 1),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_preemptions", "Samples that gave their blocks up to others.", lambda one: one.scheduler.preemptions),
    ("vllm:prompt_tokens", "Prompt tokens of admitted samples.", lambda one: one.scheduler.prompt_tokens),
    ("vllm:generation_tokens", "Tokens that were sampled.", lambda one: one.tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", lambda one: one.scheduler.prompt_tokens),
    ("vllm:prefix_cache_hits", "Those that a tier had.", lambda one: one.scheduler.hit_tokens),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Sight], tuple[Counts, float]]], ...] = (
    ("vllm:time_to_first_token_seconds", "To the first token.", lambda one: (one.ttft, one.ttft_s)),
    (
        "vllm:request_time_per_output_token_seconds",
        "From the first token to the end, by each token.",
        lambda one: (one.tpot, one.tpot_s),
    ),
    ("vllm:e2e_request_latency_seconds", "To the end.", lambda one: (one.total, one.total_s)),
)


def vllm_metrics(
    shown: Sequence[tuple[str, Sight]], model: str, block_tokens: int, common: Mapping[str, str] | None = None
) -> Iterator[Metric]:
    """All metrics, of each engine.

    Args:
        shown: names of engines, and their sights.
        model: its name, as clients say it.
        block_tokens: tokens of a block, of every engine.
        common: labels of every series; an `engine` among them stands in the place of the engine's name.
    """
    others = dict(common or {})
    labels = [*others, "model_name", *(() if "engine" in others else ("engine",))]
    rows = [([*others.values(), model, *(() if "engine" in others else (name,))], sight) for name, sight in shown]
    # what clients size their concurrency by
    sizes = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens")
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "1; the labels say how large the cache is.", labels=[*labels, *sizes]
    )
    for values, sight in rows:
        blocks = sight.stats.scheduler.num_blocks
        cache.add_metric([*values, str(block_tokens), str(blocks), str(blocks * block_tokens)], 1)
    yield cache
    for name, text, of in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, sight in rows:
            gauge.add_metric(values, of(sight.stats))
        yield gauge
    for name, text, of in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, sight in rows:
            counter.add_metric(values, of(sight.stats))
        yield counter
    ends = CounterMetricFamily("vllm:request_success", "Ended requests.", labels=[*labels, "finished_reason"])
    for values, sight in rows:
        sums = dict.fromkeys(_REASONS.values(), 0)
        for reason, count in sight.ends:
            if reason in _REASONS:
                sums[_REASONS[reason]] += count
        for reason, count in sums.items():
            ends.add_metric([*values, reason], count)
    yield ends
    for name, text, told in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, sight in rows:
            counts, sum_s = told(sight)
            histogram.add_metric(values, _buckets(counts), sum_s)
        yield histogram


def _buckets(counts: Counts) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    by_bucket = dict(counts)
    so_far = 0
    told: list[tuple[str, float]] = []
    for bucket in range(NUM_BUCKETS):
        so_far += by_bucket.get(bucket, 0)
        if bucket == NUM_BUCKETS - 1:
            told.append(("+Inf", so_far))
        elif bucket % _TOLD_EACH:
            told.append((f"{upper_s(bucket):.4g}", so_far))
    return told
