"""Numbers of engines as metrics: each field is one, by its annotation and its sentence alone."""

from __future__ import annotations

from typing import Annotated, get_type_hints

import msgspec

from fdasync.stats import Counter, EngineStats, Gauge, Metric, SchedulerStats
from fdasync.telemetry import stats_metrics as metrics
from fdasync.telemetry.stats_metrics import stats_metrics


def told(*shown: tuple[tuple[str, ...], EngineStats | None]) -> dict[tuple[str, ...], float]:
    """Values by name and labels, in the order of the labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in stats_metrics(("engine",), shown)
        for sample in family.samples
    }


class More(msgspec.Struct, frozen=True):
    """A wash.

    Attributes:
        lost_socks: socks
            that it took.
        wait_s: how long.
        kept_nbytes: how much.
        name: no number.
        pairs: with a name of its own.
    """

    lost_socks: Counter = 0
    wait_s: float = 0.0
    kept_nbytes: Gauge = 0
    name: str = ""
    pairs: Annotated[Gauge, Metric("fdasync_socks", labels=(("kind", "pair"),))] = 0


def test_a_field_is_a_metric_without_another_line() -> None:
    named = {one.field: (one.metric.name, one.metric.text, one.counts) for one in metrics._told_of(More)}
    assert named == {
        "lost_socks": ("fdasync_lost_socks_total", "Socks that it took.", True),
        "wait_s": ("fdasync_wait_seconds", "How long.", False),
        "kept_nbytes": ("fdasync_kept_bytes", "How much.", False),
        "pairs": ("fdasync_socks", "With a name of its own.", False),
    }


def test_every_number_is_told() -> None:
    """Each has a value of its own, and all of them are found."""
    kinds = (EngineStats, SchedulerStats)
    hints = [(kind, name, hint) for kind in kinds for name, hint in get_type_hints(kind).items()]
    numbers = {(kind, name): at for at, (kind, name, hint) in enumerate(hints, 1000) if hint in (int, float)}
    of_engine, of_scheduler = [
        {name: number for (kind, name), number in numbers.items() if kind is wanted} for wanted in kinds
    ]
    scheduler = SchedulerStats(drafter="ngram", own_drafter="mtp", **of_scheduler)  # type: ignore[arg-type]
    found = told((("a",), EngineStats(scheduler=scheduler, **of_engine)))  # type: ignore[arg-type]
    assert len(numbers) > 50
    assert sorted(numbers.values()) == sorted(value for value in found.values() if value >= 1000)


def test_several_engines_are_series_and_one_out_of_reach_has_its_state_alone() -> None:
    two = EngineStats(state="paused", scheduler=SchedulerStats(weight_version="7", paused=True, drafter="ngram"))
    found = told((("a",), EngineStats(live=2)), (("b",), two), (("c",), None))
    assert {name: found["fdasync_samples_live", name] for name in "ab"} == {"a": 2, "b": 0}
    states = {key[1:] for key, value in found.items() if key[0] == "fdasync_engine_state" and value}
    assert states == {("a", "running"), ("b", "paused"), ("c", "away")}
    assert {key for key in found if "c" in key[1:]} == {
        key for key in found if key[:2] == ("fdasync_engine_state", "c")
    }
    assert (found["fdasync_weight_version", "b", "7"], found["fdasync_paused", "b"]) == (1, 1)
    assert {key[1:] for key in found if key[0] == "fdasync_drafted_tokens_total"} == {("b", "ngram")}
