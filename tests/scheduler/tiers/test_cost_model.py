"""What things cost, learnt from how long they took: `cost_model.py`, and what the scheduler feeds it."""

from __future__ import annotations

import pytest

from fdasync.scheduler.tiers.cost_model import CostModel, Mean
from tests.scheduler.tiers.scenes import make_table


def test_a_mean_begins_with_its_guess_until_the_first_measurement_takes_its_place():
    mean = Mean(10.0)
    assert mean.value == 10.0
    mean.add(20.0)
    assert mean.value == 20.0
    mean.add(20.0)
    assert mean.value == pytest.approx(20.0)
    mean.add(24.0)
    assert mean.value == pytest.approx(21.0)
    mean.add(1.0)
    assert mean.value == pytest.approx(16.0)


def test_a_mean_forgets():
    mean = Mean(1.0)
    for _ in range(40):
        mean.add(5.0)
    assert mean.value == pytest.approx(5.0, rel=1e-4)


def test_estimates_are_in_seconds():
    rates = CostModel(prefill_tokens_per_s=100.0, fetch_nbytes_per_s=1e6, lookup_s=0.002)
    assert rates.recompute_s(50) == pytest.approx(0.5)
    assert rates.fetch_s(2000) == pytest.approx(0.002)
    assert rates.lookup_s == 0.002


def test_means_are_of_seconds_per_unit_not_of_rates():
    rates = CostModel(100.0, 1000.0, 0.01)
    rates.prefilled(10, 1.0)
    rates.fetched(100, 1.0)
    rates.looked_up(0.11)
    assert rates.recompute_s(1) == pytest.approx(0.1)
    assert rates.fetch_s(1) == pytest.approx(0.01)
    assert rates.lookup_s == pytest.approx(0.11)
    # ten tokens a second, then ninety: a quarter of the way in seconds per token
    rates.prefilled(90, 1.0)
    assert rates.recompute_s(1) == pytest.approx(0.75 * 0.1 + 0.25 / 90)


# -- what the scheduler measures


def measuring(**config):
    """With a store that is never worth a question, so that its cost model alone is at work."""
    return make_table(fetch_min_tokens=1000, **config)


def prefill_s(table):
    return table.scheduler.store_planner.rates.recompute_s(1)


def test_prefill_is_measured_from_the_plan_of_a_step_to_its_end():
    table = measuring()
    table.turn(table.request(1, range(8), 3))
    table.now = 1.4
    table.turn(table.done())
    # eight tokens in 0.4 s
    assert prefill_s(table) == pytest.approx(0.05)


def test_a_step_that_waited_for_the_one_before_is_measured_from_its_end():
    table = measuring(pipeline_depth=2, max_step_tokens=8)
    table.turn(table.request(1, range(16), 3))
    for seconds in (0.4, 0.2):
        table.now += seconds
        table.turn(table.done())
    # both were planned at 1.0; the first took 0.4 s, the second 0.2 s after it
    mean = Mean(0.1)
    mean.add(0.05)
    mean.add(0.025)
    assert prefill_s(table) == pytest.approx(mean.value)


@pytest.mark.parametrize("what", ["decodes", "a short prompt", "no time"])
def test_steps_that_tell_nothing_of_prefill_are_not_measured(what):
    table = measuring()
    if what == "decodes":
        table.turn(*(table.request(key, [key], 9) for key in range(3)))
        table.turn(table.done())
        # four tokens of prefill beside three decodes would count, three would not
        before = prefill_s(table)
        table.now = 2.0
        table.turn(table.done())
    elif what == "a short prompt":
        before = prefill_s(table)
        table.turn(table.request(1, [1, 2, 3], 2))
        table.now = 2.0
        table.turn(table.done())
    else:
        before = prefill_s(table)
        table.turn(table.request(1, range(8), 2))
        table.turn(table.done())
    assert prefill_s(table) == before


def test_mostly_prefill_is_measured_and_mostly_decode_is_not():
    table = measuring(max_step_tokens=64, max_running=16)
    table.turn(*(table.request(key, [key], 20) for key in range(5)))
    table.turn(table.done())
    before = prefill_s(table)
    table.turn(table.request(8, range(50, 55), 2), table.done())
    table.now += 1.0
    table.turn(table.done())
    assert prefill_s(table) == before
    table.turn(table.request(9, range(60, 72), 2))
    table.turn(table.done())
    table.now += 1.0
    table.turn(table.done())
    assert prefill_s(table) != before


def test_fetches_and_lookups_are_measured_where_they_were_answered():
    table = make_table(range(13))
    rates = table.scheduler.store_planner.rates
    table.turn(table.request(1, range(13), 2))
    table.turn(table.looked_up(seconds=0.012))
    assert rates.lookup_s == pytest.approx(0.012)
    table.turn(table.fetched(arrived="++-", seconds=0.004))
    # two blocks of 1,000 bytes came
    assert rates.fetch_s(1) == pytest.approx(2e-6)
    table.run()


@pytest.mark.parametrize("what", ["lookup", "fetch"])
def test_what_did_not_come_is_not_measured(what):
    table = make_table(range(13))
    rates = table.scheduler.store_planner.rates
    table.turn(table.request(1, range(13), 2))
    if what == "lookup":
        table.turn(table.looked_up(count=0, answered=False, seconds=9.0))
        assert rates.lookup_s == 0.002
    else:
        table.turn(table.looked_up(seconds=0.002))
        table.turn(table.fetched(arrived="---", seconds=9.0, late=True))
        # but for that it is no faster
        assert rates.fetch_s(3) == pytest.approx(9.0 / table.config.block_nbytes)
        table.turn(table.returned(min(table.late), "---"))
    table.run()


def test_a_store_that_became_slow_is_soon_left_alone():
    table = make_table(range(13))
    table.turn(table.request(1, range(13), 1))
    table.turn(table.looked_up(seconds=2.0, count=0))
    # twelve tokens are computed in 1.2 s
    assert table.turn(table.request(2, range(100, 113), 1)).lookups == []
    assert len(table.turn(table.request(3, range(200, 301), 1)).lookups) == 1
    table.run()
