"""Histograms of durations."""

from __future__ import annotations

import math
import random

import pytest

from fdasync.telemetry.sight.latencies import NUM_BUCKETS, Histogram, added, bucket_of, quantile, total, upper_s


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e-4, 1.7e-4, 0.02, 1.0, 77.0, 1600.0, 1e6, math.inf])
def test_a_duration_is_below_the_bound_of_its_bucket(seconds: float) -> None:
    bucket = min(bucket_of(min(seconds, 1e300)), NUM_BUCKETS - 1)
    assert seconds <= upper_s(bucket) * (1 + 1e-9)
    if bucket:
        assert seconds >= upper_s(bucket - 1) * (1 - 1e-9)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_quantile_is_right_to_a_fifth(share: float) -> None:
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(-4.0, 1.5) for _ in range(5000))
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    exact = values[int(share * len(values))]
    found = quantile(histogram.counts, share)
    assert found is not None
    assert exact / 1.2 < found < exact * 1.2
    assert histogram.sum_s == pytest.approx(sum(values))


def test_histograms_add_up_and_have_differences() -> None:
    first, second = Histogram(), Histogram()
    for value in (0.01, 0.01, 3.0):
        first.observe(value)
    before = first.counts
    first.observe(3.0)
    first.observe(9.0)
    second.observe(0.01)
    assert total(first.since(before)) == 2
    assert added([before, first.since(before)]) == first.counts
    assert total(added([first.counts, second.counts])) == 6
    assert first.since(first.counts) == ()
    assert quantile((), 0.5) is None
    # the last bucket has no upper bound
    assert quantile(((NUM_BUCKETS - 1, 1),), 0.99) == pytest.approx(upper_s(NUM_BUCKETS - 2))
