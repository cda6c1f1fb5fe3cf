"""The runner's own drafts: how many a step is told to make, what of them is counted, and what a runner must tell."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fdasync.drafting import DraftPlanner
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Drafts
from tests.scheduler.table import Table

LONG = 400


def own_table(**config) -> Table:
    given = {"max_run_tokens": 4, "max_step_tokens": 64, "num_blocks": 256, "own_drafter": "mtp", "pipeline_depth": 1}
    return Table(**{**given, **config})


class Runner:
    """Steps of one sequence: what the step before drafted is forwarded, `right` of it is accepted, and a step takes a
    second and `row_s` for each draft."""

    def __init__(self, table: Table, right: int, row_s: float) -> None:
        self.table, self.right, self.row_s = table, right, row_s
        self.drafted = 0
        self.told: list[int | None] = []
        self.accepted = self.forwarded = self.known = 0

    def step(self, *, chunk: bool = False) -> None:
        table = self.table
        told = table.flying[0].own_drafts
        drafts = 0 if chunk else self.drafted
        run = range(self.known, self.known + 1 + min(self.right, drafts))
        self.told.append(told)
        self.drafted = 3 if told is None else told
        table.now += 1 + self.row_s * drafts
        self.forwarded += drafts
        self.accepted += len(run) - 1
        self.known += len(run)
        table.turn(replace(table.runs(run), own_drafts=(drafts,), at=table.now))

    def play(self, count: int) -> None:
        self.table.turn(self.table.request(1, range(6), LONG))
        self.step(chunk=True)
        for _ in range(count):
            self.step()


def test_without_a_budget_the_runner_drafts_as_many_as_it_may():
    runner = Runner(own_table(weighs_drafts=False), right=1, row_s=9.0)
    runner.play(20)
    assert set(runner.told) == {None}
    stats = runner.table.scheduler.stats()
    assert (stats.own_drafter, stats.own_drafting_steps) == ("mtp", 20)
    assert (stats.own_drafted_tokens, stats.own_accepted_tokens) == (runner.forwarded, runner.accepted) == (60, 20)
    runner.table.turn(runner.table.abort(1))
    assert runner.table.finished[1].drafts == (20, 60, 20)


@pytest.mark.parametrize(("right", "row_s", "best"), [(3, 0.1, 3), (0, 0.1, 0), (1, 0.2, 1)])
def test_with_the_budget_it_drafts_as_many_as_pay(right: int, row_s: float, best: int):
    runner = Runner(own_table(), right, row_s)
    runner.play(90)
    # each number has had its try by then
    assert set(runner.told) == {0, 1, 2, 3}
    assert runner.told[40:60] == [best] * 20
    stats = runner.table.scheduler.stats()
    assert (stats.own_drafted_tokens, stats.own_accepted_tokens) == (runner.forwarded, runner.accepted)


def test_a_step_with_paths_of_the_host_is_no_price(monkeypatch: pytest.MonkeyPatch):
    """It verifies other drafts too. So no number gets a price, and drafts that are right are made without."""
    table = own_table(drafter="ngram", drafter_config={})
    monkeypatch.setattr(DraftPlanner, "plan", lambda *_: Drafts((1,), (1,), (1,), (1,), bytes(4)))
    monkeypatch.setattr(DraftPlanner, "done", lambda *_args, **_more: False)
    runner = Runner(table, right=3, row_s=9.0)
    runner.play(60)
    # with prices none would be made
    assert runner.told[30:] == [3] * len(runner.told[30:])


def test_a_drafter_of_the_runner_alone_is_told_of_no_paths():
    table = own_table()
    table.turn(table.request(1, range(6), 20))
    assert table.flying[0].drafts is None


def test_who_has_no_drafter_is_told_nothing():
    table = own_table(own_drafter="")
    table.turn(table.request(1, range(6), 20))
    assert table.flying[0].own_drafts is None


@pytest.mark.parametrize("told", [None, (1, 1)])
def test_a_runner_that_does_not_tell_its_drafts_has_broken_the_contract(told: tuple[int, ...] | None):
    table = own_table()
    table.turn(table.request(1, range(6), 20))
    table.turn(replace(table.runs([100]), own_drafts=(0,)))
    with pytest.raises(InvariantBroken, match="does not tell the drafts of mtp"):
        table.turn(replace(table.runs([101]), own_drafts=told))
