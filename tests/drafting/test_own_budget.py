"""How many drafts of the runner's own drafter pay (`own_budget.py`), against engines that are played here."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest

from fdasync.drafting.own_budget import OwnBudget

DEPTH = 2


class Played:
    """Steps of an engine with two in flight: what `m` drafts cost and how often they are right is given."""

    def __init__(self, budget, price, acceptance, seed=0):
        self.budget, self.price, self.acceptance = budget, price, acceptance
        self.rng = np.random.default_rng(seed)
        self.flights = deque()
        self.before = 0
        self.tokens = self.seconds = 0.0
        self.numbers = Counter()

    def steps(self, count, running, paths=False):
        for _ in range(count):
            drafts = self.budget.plan(running)
            self.numbers[drafts] += 1
            # what the step before drafted is verified, and its passes are part of this step's time
            self.flights.append((self.before, max(self.before, drafts), running))
            self.before = drafts
            if len(self.flights) == DEPTH:
                self.end(paths)

    def end(self, paths):
        verified, _, running = self.flights.popleft()
        right = (self.rng.random((running, max(verified, 1))) < self.acceptance).cumprod(axis=1)[:, :verified].sum(1)
        seconds = self.price(verified, running) * self.rng.uniform(0.97, 1.03)
        self.tokens += running + right.sum()
        self.seconds += seconds
        self.budget.done([verified] * running, (1 + right).tolist(), None if paths else seconds)

    def rate(self):
        return self.tokens / self.seconds


def linear(row):
    """A step of 1, and so much more for each draft."""
    return lambda drafts, _running: 1.0 + row * drafts


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("acceptance", "row", "best"),
    [(0.7, 0.05, 3), (0.7, 0.45, 1), (0.9, 0.5, 3), (0.3, 0.5, 0), (0.05, 0.1, 0), (0.6, 0.25, 2)],
)
def test_what_pays_is_played(acceptance, row, best):
    play = Played(OwnBudget(3), linear(row), acceptance)
    play.steps(3000, 32)
    rates = {drafts: np.sum(acceptance ** np.arange(drafts + 1)) / (1 + row * drafts) for drafts in range(4)}
    # a neighbour may be as good as the best
    near = [drafts for drafts, rate in rates.items() if rate > 0.97 * rates[best]]
    assert max(rates, key=rates.get) == best
    assert sum(play.numbers[drafts] for drafts in near) > 0.9 * 3000
    assert play.rate() / 32 > 0.96 * rates[best]
    assert play.rate() / 32 > 0.985 * rates[0]


def test_the_number_that_runs_decides():
    """Rows are dear beside few sequences and cheap beside many, as where weights are read anew for every expert."""

    def price(drafts, running):
        return (1 + running / 16) * (1 + drafts * (0.5 if running < 16 else 0.02))

    play = Played(OwnBudget(3), price, 0.4)
    for _ in range(3):
        for running in (4, 64):
            play.steps(150, running)
    play.numbers.clear()
    play.steps(100, 4)
    assert play.numbers[0] > 80
    play.numbers.clear()
    play.steps(100, 64)
    # two are nearly as good as three
    assert play.numbers[3] + play.numbers[2] > 80
    assert play.numbers[0] <= 10


def test_near_another_number_of_sequences_none_and_the_best_are_tried():
    play = Played(OwnBudget(3), linear(0.1), 0.8)
    play.steps(100, 4)
    play.numbers.clear()
    play.steps(8 + 2 * 6, 64)
    assert play.numbers[0] >= 6
    assert play.numbers[0] + play.numbers[3] == 20
    play.numbers.clear()
    # and not again for as many, or a few more
    play.steps(30, 80)
    assert play.numbers[0] == 0


def test_without_times_drafts_are_made_while_they_are_right():
    """All steps compute prompts, too."""
    play = Played(OwnBudget(3), linear(0.1), 0.8)
    play.steps(400, 16, paths=True)
    assert play.numbers[3] > 350
    play.acceptance = 0.05
    play.steps(200, 16, paths=True)
    play.numbers.clear()
    play.steps(2000, 16, paths=True)
    # looked at now and then
    assert 0 < play.numbers[3] < 60
    play.acceptance = 0.8
    play.steps(3000, 16, paths=True)
    play.numbers.clear()
    play.steps(100, 16, paths=True)
    assert play.numbers[3] == 100
    # and with times again it is as ever
    play.numbers.clear()
    play.steps(200, 16)
    assert len(play.numbers) == 4


@pytest.mark.parametrize(("price", "best"), [(1.29, 0), (1.25, 1)])
def test_what_gives_next_to_nothing_is_not_played(price, best):
    """Of 100 drafts 30 are right, always: less than 1 % of gain, and 4 %."""
    budget, before, played = OwnBudget(1), 0, Counter()
    for _ in range(400):
        drafts = budget.plan(100)
        played[drafts] += 1
        budget.done([before] * 100, [2 if before and number < 30 else 1 for number in range(100)], (1.0, price)[before])
        before = drafts
    assert played[best] > 370


@pytest.mark.ci
def test_looks_are_frequent_behind_a_change():
    play = Played(OwnBudget(3), linear(0.1), 0.9)
    play.steps(4000, 32)
    play.acceptance = 0.02
    play.steps(200, 32)
    play.acceptance = 0.9
    play.steps(700, 32)
    play.numbers.clear()
    play.steps(100, 32)
    assert play.numbers[3] + play.numbers[2] > 80


@pytest.mark.ci
def test_what_changes_is_noticed():
    play = Played(OwnBudget(3), linear(0.2), 0.05)
    play.steps(1000, 32)
    play.numbers.clear()
    play.steps(100, 32)
    assert play.numbers[0] > 75
    # tries are rare by now, and each shows a part of it
    play.acceptance = 0.9
    play.steps(6000, 32)
    play.numbers.clear()
    play.steps(100, 32)
    assert play.numbers[3] > 80
    play.acceptance = 0.05
    play.steps(200, 32)
    play.numbers.clear()
    play.steps(100, 32)
    assert play.numbers[0] > 80


@pytest.mark.ci
def test_a_stall_is_no_price():
    """Whatever step it falls on, of a first try or later."""
    for stalled in (*range(1, 30), 300):
        times = iter(range(10_000))
        price = linear(0.3)

        def stalls(drafts, running, *, times=times, price=price, stalled=stalled):
            return price(drafts, running) * (20 if next(times) == stalled else 1)

        play = Played(OwnBudget(3), stalls, 0.02)
        play.steps(460, 32)
        # three tries and a few looks are all that drafts
        assert play.numbers[0] > 415, stalled


def test_steps_of_prompts_alone_go_on_as_before():
    budget = OwnBudget(3)
    play = Played(budget, linear(0.01), 0.9)
    play.steps(200, 8)
    assert budget.plan(0) == 3
    budget.done((), (), None)


def test_acceptance_is_that_of_each_depth():
    budget = OwnBudget(3)
    for _ in range(2000):
        budget.plan(4)
        # the first is right in half of the cases, the second in all of those, the third never
        budget.done((3, 3, 1, 3), (3, 1, 2, 1), 1.0)
    assert budget.expected_tokens(1) == pytest.approx(1.5, abs=0.01)
    assert budget.expected_tokens(2) == pytest.approx(2.0, abs=0.02)
    assert budget.expected_tokens(3) == pytest.approx(2.0, abs=0.02)


@pytest.mark.ci
def test_many_drafts_are_tried_in_few_numbers():
    play = Played(OwnBudget(24), linear(0.01), 0.95)
    play.steps(2000, 16)
    assert set(play.numbers) == {0, 1, 2, 4, 8, 16, 24}
    assert play.numbers[24] + play.numbers[16] > 1700
