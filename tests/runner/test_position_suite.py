"""The suite for chosen positions finds runners that write them wrongly."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from fdasync.errors import InvariantBroken
from fdasync.runner.chosen import ChosenRows
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing import RunnerTests

ALL = "test_a_sequence_has_the_chosen_positions_of_all_its_tokens"
BESIDE = "test_chosen_positions_are_those_of_one_sequence_from_its_first_on"
AGAIN = "test_rows_that_stand_stay_when_a_sequence_starts_again"
CANCELLED = "test_a_call_of_lend_that_is_cancelled_is_taken_back"


class Broken(SyntheticRunner):
    """Ways to be wrong that the suite must not let pass."""

    way = ""

    async def lend(self, key, rows):
        if self.way == "begins at the first position":
            rows = ChosenRows(rows.region, rows.shape, 0, rows.most)
        if self.way == "takes back what it was lent only":
            await asyncio.sleep(0)
        await super().lend(key, rows)

    def take_back(self, key):
        if self.way == "takes back what it was lent only" and key not in self._lent._rows:
            raise InvariantBroken("never lent")
        if self.way != "keeps the rows of old":
            super().take_back(key)

    def _compute(self, batch):
        output = super()._compute(batch)
        if self.way == "leaves decodes out" and (batch.counts == 1).all():
            self._chosen = []
        if self.way == "sees what is to come":
            self._chosen = [(run, picked + 1) for run, picked in self._chosen]
        if self.way == "the one beside" and len(self._chosen) == 2:
            (one, first), (other, second) = self._chosen
            self._chosen = [(one, np.resize(second, first.shape)), (other, np.resize(first, second.shape))]
        if self.way == "twice the best":
            for _, picked in self._chosen:
                picked[:, :, 1] = picked[:, :, 0]
        if self.way == "writes anew":
            for run, _ in self._chosen:
                run.rows._count[0] = min(run.position, run.rows.count)
        return output


class Suite(RunnerTests):
    way = ""

    def make(self, limits):
        runner = Broken(SyntheticConfig(chosen_top_k=3), limits)
        runner.way = self.way
        # so that what was lent before stays
        runner._lent.lend = runner._lent._rows.setdefault if self.way == "keeps the rows of old" else runner._lent.lend
        return runner


def fails(suite, test) -> bool:
    """Whether the test fails."""
    try:
        getattr(suite, test)()
    except (AssertionError, InvariantBroken):
        return True
    return False


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("leaves decodes out", ALL),
        ("sees what is to come", ALL),
        ("twice the best", ALL),
        ("begins at the first position", BESIDE),
        ("the one beside", BESIDE),
        ("writes anew", AGAIN),
        ("keeps the rows of old", AGAIN),
        ("takes back what it was lent only", CANCELLED),
    ],
)
def test_the_suite_finds_positions_that_are_written_wrongly(way, test):
    getattr(Suite(), test)()
    suite = Suite()
    suite.way = way
    assert fails(suite, test)
    # frames of the failure have the rows, and refer to each other
    gc.collect()


@pytest.mark.parametrize("test", [ALL, BESIDE, AGAIN, CANCELLED])
def test_a_runner_without_indexers_is_asked_nothing(test):
    class Without(RunnerTests):
        def make(self, limits):
            return SyntheticRunner(SyntheticConfig(), limits)

    getattr(Without(), test)()
