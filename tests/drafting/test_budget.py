"""How many drafts pay (`budget.py`)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdasync.drafting.budget import StepPrices, choose_drafts, expected_tokens


def choose(acceptance, most, known, reach=1.0, running=None):
    acceptance = np.array(acceptance, float)
    reaches = np.full(len(acceptance), reach)
    return choose_drafts(acceptance, reaches, most, known, len(acceptance) if running is None else running).tolist()


def prices(*measured):
    known = StepPrices()
    for rows, seconds in measured:
        known.measure(rows, seconds)
    return known


FREE = ((1, 1.0), (1 << 20, 1.0))


def test_no_drafts_before_the_plain_step_was_measured():
    assert choose([0.9] * 16, 3, StepPrices()) == [0] * 16
    assert choose([0.9] * 16, 3, prices((64, 1.0))) == [0] * 16
    # above what was measured rows are as dear as all of them
    assert choose([0.9] * 16, 3, prices((16, 1.0))) == [0] * 16


def test_free_rows_are_all_taken_and_dear_ones_not():
    assert choose([0.9, 0.5], 3, prices((2, 1.0), (16, 1.0))) == [3, 3]
    assert choose([0.9, 0.5], 3, prices((2, 1.0), (8, 4.0))) == [0, 0]


def test_the_likeliest_drafts_come_first():
    # a row costs half of what a token takes: only drafts that count with a chance above that pay
    dear = prices((8, 1.0), (64, 4.5))
    drafts = choose([0.95, 0.05] * 4, 3, dear)
    assert min(drafts[::2]) > 0
    assert drafts[1::2] == [0] * 4


def test_a_path_that_seldom_fits_at_its_step_gets_fewer_drafts():
    dear = prices((8, 1.0), (64, 4.5))
    assert choose([0.8, 0.7] * 4, 3, dear, reach=0.7) < choose([0.8, 0.7] * 4, 3, dear)
    assert sum(choose([0.95] * 8, 3, dear, reach=0.4)) == 0


def test_sequences_without_drafts_count_as_rows():
    # what the step costs by itself, the drafts need not earn
    assert choose([0.9], 3, prices((16, 1.0), (32, 1.1)), running=16) == [3]
    assert choose([0.9], 3, prices((16, 1.0), (32, 3.0)), running=16) == [0]


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
# a chance so small that it vanishes beside a token
@example([0.0, 4.9e-96], 1, [1.0])
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 3), st.lists(st.floats(0.1, 3.0), min_size=1))
def test_no_other_choice_is_better(acceptance, most, steps):
    """Against all choices of drafts for up to four sequences."""
    known = prices(*((1 << number, sum(steps[: number + 1])) for number in range(len(steps))), (len(acceptance), 1.0))

    def rate(drafts):
        tokens = sum(expected_tokens(min(a, 0.99), m) for a, m in zip(acceptance, drafts, strict=True))
        return tokens / known.of(np.array([len(acceptance) + sum(drafts)]))[0]

    chosen = choose(acceptance, most, known)
    assert all(0 <= drafts <= most for drafts in chosen)
    plain, best = rate([0] * len(acceptance)), max(map(rate, product(range(most + 1), repeat=len(acceptance))))
    if any(chosen):
        assert rate(chosen) == pytest.approx(best)
        assert rate(chosen) > plain
    else:
        # they gave less than 1.1 times what their rows cost
        assert best <= plain * 1.1


def test_prices_rise_with_rows_and_follow_what_is_measured():
    known = prices((16, 1.0), (64, 2.0))
    rows = np.arange(1, 300)
    assert (np.diff(known.of(rows)) >= 0).all()
    assert known.of(np.array([40]))[0] == pytest.approx(1.5)
    assert known.of(np.array([112]))[0] == pytest.approx(3.0)
    assert prices((16, 1.0)).of(np.array([8, 32])) == pytest.approx([1.0, 2.0])
    for _ in range(100):
        known.measure(16, 4.0)
    assert (np.diff(known.of(rows)) >= 0).all()
    for _ in range(100):
        known.measure(64, 6.0)
    assert known.of(np.array([16, 64])) == pytest.approx([4.0, 6.0], rel=1e-3)


def test_a_stall_is_no_price_and_nonsense_is_passed_over():
    known = prices((16, 1.0))
    known.measure(16, 1000.0)
    assert known.of(np.array([16]))[0] < 1.5
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        known.measure(16, wrong)
        known.measure(1, wrong)
    assert known.of(np.array([16]))[0] < 1.5
    assert not known.knows(1)


def test_one_path_among_many_sequences_is_used_where_rows_are_cheap():
    assert choose([0.9], 3, prices((128, 1.0), (256, 1.2)), running=128) == [3]


def test_few_rows_have_prices_of_their_own():
    """A step with drafts must not pass for a plain one."""
    for running in range(1, 65):
        known = prices((running, 1.0), (max(running + 1, round(running * 1.3)), 2.0))
        assert known.of(np.array([running]))[0] == 1.0
        assert choose([0.9] * running, 3, known) == [0] * running


def test_a_step_of_any_size_has_a_price():
    known = StepPrices()
    for rows in range(1, 5000):
        known.measure(rows, rows * 1e-3)
    rows = np.arange(1, 10_000)
    assert known.of(rows) == pytest.approx(rows * 1e-3, rel=0.2)
    known.measure(1 << 40, 1e6)


def test_expected_tokens():
    assert [expected_tokens(a, 3) for a in (0.0, 0.5, 1.0)] == [1.0, 1.875, 4.0]


def test_nothing_runs():
    assert choose([], 3, prices(*FREE)) == []
