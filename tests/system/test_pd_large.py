"""Many instances and many requests, with failures: everybody is served or told, and it stays affordable."""

from __future__ import annotations

import pytest

from fdasync.testing import run_sim
from tests.system.pd_large import LargeFleet, Report


def said(report: Report) -> str:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(report.outcomes.items()))
    return (
        f"{report.requests} requests ({outcomes}) in {report.virtual_s:.0f} s: {report.goodput:.0f} tokens/s; "
        f"{report.leases} leases, p50 {report.lease_ms[0]:.1f} ms, p99 {report.lease_ms[1]:.1f} ms; "
        f"scheduler {report.scheduler_share:.0%} of {report.cpu_s:.0f} s CPU"
    )


def check(report: Report) -> None:
    assert sum(report.outcomes.values()) == report.requests
    assert set(report.outcomes) <= {"length", "InstanceLost"}
    # most of what was lost was tried again
    assert report.outcomes.get("InstanceLost", 0) < report.requests / 100


@pytest.mark.ci
def test_a_fleet_of_eight(capsys):
    report = run_sim(LargeFleet(4, 200, 4.0).play())
    check(report)


@pytest.mark.nightly
def test_a_fleet_of_two_hundred(capsys):
    report = run_sim(LargeFleet(100, 20_000, 60.0).play())
    with capsys.disabled():
        print(f"\n{said(report)}")
    check(report)
