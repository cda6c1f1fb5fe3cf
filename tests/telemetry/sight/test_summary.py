"""What people read off the sights of several engines."""

from __future__ import annotations

import msgspec
import pytest

from fdasync.stats import EngineStats, TapStats
from fdasync.telemetry.sight.summary import Summary, summary_of
from tests.telemetry.sight.scene import counts, moment, picks, sight, stats, watched


def busy(token_s: float, running: int = 10, **values: object) -> object:
    """An engine whose samples wait so long for each token."""
    moments = [moment(number, tokens=round(5 * running / token_s), running=running) for number in (1, 2, 3)]
    return sight(running=running, moments=tuple(moments), **values)


def test_rates_are_of_the_window_and_engines_add_up() -> None:
    old = moment(1, tokens=10_000)
    first = [moment(2, tokens=50, prompt_tokens=100, hits=(30, 0, 10), finished=5, ttft=counts(0.1, 0.1))]
    second = [moment(7, tokens=100, prompt_tokens=100, hits=(0, 20, 0), tpot=counts(0.02), ttft=counts(2.0))]
    told = summary_of(
        [watched("a", shown=sight(moments=(old, *first))), watched("b", shown=sight(moments=tuple(second)))],
        model="m",
        window_s=5.0,
    )
    rates = told.rates
    assert (rates.tokens_per_s, rates.prompt_tokens_per_s, rates.finished_per_s) == (30.0, 40.0, 1.0)
    assert rates.hit_share == (0.15, 0.1, 0.05)
    assert rates.ttft.count == 3
    assert rates.ttft.p50 == pytest.approx(0.1, rel=0.2)
    assert rates.ttft.p99 == pytest.approx(2.0, rel=0.2)
    assert (rates.tpot.count, rates.seconds) == (1, 5.0)
    wide = summary_of([watched("a", shown=sight(moments=(old, *first)))], model="m", window_s=10.0)
    assert wide.rates.tokens_per_s == 1005.0
    # the latest moments of all stand side by side, whatever their numbers
    assert [(past.age_s, past.rates.tokens_per_s) for past in told.history] == [(5.0, 2000.0), (0.0, 30.0)]


def test_a_request_that_is_handed_over_counts_once() -> None:
    prefill = moment(1, tokens=1, prompt_tokens=100, hits=(40, 0, 0), finished=1, running=1)
    decode = moment(1, tokens=50, prompt_tokens=100, hits=(90, 0, 0), finished=1, running=1, ttft=counts(0.1))
    both = [
        watched("p0", "prefill", sight(moments=(prefill,))),
        watched("d0", "decode", sight(moments=(decode,))),
    ]
    told = summary_of(both, model="m")
    for rates in (told.rates, told.history[0].rates):
        assert (rates.tokens_per_s, rates.prompt_tokens_per_s, rates.finished_per_s) == (10.0, 20.0, 0.2)
        assert rates.hit_share == (0.4, 0.0, 0.0)
        assert (rates.token_s, rates.ttft.count) == (0.1, 1)
    # each tells of itself what it did
    assert [one.rates.prompt_tokens_per_s for one in told.engines] == [20.0, 20.0]
    # without a prefill side the decode side serves requests whole
    away = [msgspec.structs.replace(both[0], is_up=False), both[1]]
    assert summary_of(away, model="m").rates.prompt_tokens_per_s == 20.0


def test_gauges_add_up_but_for_engines_that_are_not_there() -> None:
    numbers = {
        "running": 3, "waiting": 2, "waiting_for_place": 1, "leased": 4, "hand_offs": 5, "used_blocks": 5,
        "idle_blocks": 3, "free_blocks": 2, "free_host_blocks": 6, "used_slots": 12, "free_slots": 4,
        "leases_granted": 3, "leases_denied": 2, "leases_dropped": 1, "queued_tokens": 9,
    }  # fmt: skip
    shown = sight(**numbers, loop_late_max_s=0.5)
    told = summary_of(
        [
            watched("a", shown=shown),
            watched("b", shown=sight(**numbers, weight_version="1")),
            watched("c", shown=shown, is_up=False, problem="silent for 3 s"),
            watched("d", shown=shown, age_s=9.0),
            watched("", shown=None, role=""),
        ],
        model="m",
    )
    twice = {name: 2 * number for name, number in numbers.items()}
    assert told.stats == stats(**twice, loop_late_max_s=0.5, weight_version="0, 1")
    assert (told.stats.scheduler.num_blocks, told.stats.scheduler.num_host_blocks) == (20, 12)
    assert told.weight_version == "0, 1"
    assert [one.state for one in told.engines] == ["running", "running", "away", "silent", "silent"]
    assert told.problems == (
        "c: silent for 3 s",
        "d: has not answered for 9 s",
        "ipc:///run/: does not say how it is",
    )


def test_problems_of_stores_and_taps_are_told() -> None:
    shown = sight(store_problem="refused", taps=(TapStats(name="json", problem="full", dropped=3),))
    told = summary_of([watched("a", shown=shown, problem="it has other weights")], model="m")
    assert told.problems == (
        "a: it has other weights",
        "a: without its store: refused",
        "a: without taps: json: full",
        "a: its taps lost 3 events",
    )


def test_texts_of_all_engines_are_in_the_sum_and_taps_of_one_name_add_up() -> None:
    shown = [
        sight(store_problem=problem, released=released, taps=(TapStats(name="json", problem=problem, dropped=dropped),))
        for problem, released, dropped in (("", ("weights",), 1), ("full", (), 0), ("x" * 300, (), 2), ("full", (), 1))
    ]
    told = summary_of([watched("a", shown=one) for one in shown], model="m").stats
    assert told.store_problem == f"full, {'x' * 250}"
    assert told.released == ("weights",)
    assert told.taps == (TapStats(name="json", problem=told.store_problem, dropped=4),)
    assert summary_of([watched("a", shown=shown[2])], model="m").stats == shown[2].stats
    assert msgspec.json.decode(msgspec.json.encode(told), type=EngineStats) == told


def test_the_slow_one_among_its_like_is_named() -> None:
    told = summary_of(
        [
            watched("d0", "decode", busy(0.010)),
            watched("d1", "decode", busy(0.031)),
            watched("d2", "decode", busy(0.011)),
            # others do other work
            watched("m0", "mixed", busy(0.100)),
            watched("p0", "prefill", busy(0.5)),
            watched("p1", "prefill", busy(0.01)),
        ],
        model="m",
    )
    assert [one.name for one in told.engines if one.slow] == ["d1"]
    (problem,) = told.problems
    assert problem.startswith("d1: slow: a token takes 31 ms, at the others 10.5 ms")


def test_experts_that_nobody_chose_are_named_where_chance_does_not_explain_it() -> None:
    first = picks([[400, 0, 500, 300], [3, 0, 2, 1]], rows=600)
    second = picks([[100, 0, 0, 100], [0, 0, 1, 1]], rows=100)
    before = picks([[0, 0, 0, 0], [1, 1, 1, 1]], "before", rows=4)
    shown = [sight(picks=(first, before)), sight(picks=(second,))]
    now, past = summary_of([watched(str(at), shown=one) for at, one in enumerate(shown)], model="m").experts
    assert (now.version, now.layers, now.num_experts, now.rows, now.counted) == ("0", (3, 4), 4, 700, 700)
    assert now.table == [[500, 0, 500, 400], [3, 0, 3, 2]]
    assert now.imbalance == (500 / 350, 1.5)
    # eight picks of four experts in layer 4 prove nothing
    assert now.dead == ((3, 1),)
    assert (past.version, past.imbalance, past.dead) == ("before", (0.0, 1.0), ())
    # where one of 100 rows was looked at, 1,400 picks are 14
    sampled = picks([[500, 0, 500, 400], [3, 0, 3, 2]], rows=700, counted=7)
    assert summary_of([watched("a", shown=sight(picks=(sampled,)))], model="m").experts[0].dead == ()


def test_it_crosses_json_as_it_is() -> None:
    told = summary_of([watched("a", shown=busy(0.01, picks=(picks([[1, 2]]),)))], model="m")
    assert msgspec.json.decode(msgspec.json.encode(told), type=Summary) == told
    assert summary_of([], model="m").rates.tokens_per_s == 0.0


def test_the_whole_is_in_the_state_of_the_one_nearest_to_running() -> None:
    def of(*states: str) -> Summary:
        return summary_of([watched(state, shown=sight(state=state)) for state in states], model="m")

    assert (of("asleep", "running").state, of("asleep", "running").states) == ("running", {"running": 1, "asleep": 1})
    assert of("waking", "updating", "broken").state == of("waking", "updating", "broken").stats.state == "broken"
    assert of("draining", "waking").state == "waking"
    assert [problem.partition(":")[0] for problem in of("waits_for_weights", "broken", "asleep").problems] == [
        "waits_for_weights",
        "broken",
    ]
    away = summary_of([watched("a", shown=sight(state="asleep"), is_up=False, problem="silent")], model="m")
    assert (away.state, away.states) == ("away", {"away": 1})
    assert (summary_of([], model="m").state, summary_of([], model="m").states) == ("away", {})
