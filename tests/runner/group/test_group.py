"""The conformance suite on groups of synthetic runners: in one process, with ranks that are late, and in workers."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from fdasync.errors import ConfigError, InvariantBroken
from fdasync.runner.group.workers import WorkerGroup
from fdasync.runner.shares import Part, part_of
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import DraftTests, FaultRunner, RunTests
from tests.runner import test_synthetic
from tests.support.groups import group_of


class TestGroupOfTwo(test_synthetic.TestSynthetic):
    """Each rank writes half of every block."""

    ranks = 2
    config = {**test_synthetic.TestSynthetic.config, "kv_shares": 2}  # noqa: RUF012

    def make(self, limits):
        return group_of(super().make, limits, self.ranks)

    def make_of(self, limits, weights):
        return group_of(lambda own: super(TestGroupOfTwo, self).make_of(own, weights), limits, self.ranks)


@pytest.mark.ci
class TestGroupOfFourWithLateRanks(TestGroupOfTwo):
    """Two shares, each on two ranks, of which one writes; every rank answers at a time of its own."""

    ranks = 4

    def make(self, limits):
        def late(own):
            runner = SyntheticRunner(SyntheticConfig(**self.config), own)
            return FaultRunner(runner, Random(own.rank), max_delay_s=0.002)

        return group_of(late, limits, self.ranks)


class TestRunsOfAGroup(RunTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012

    def make(self, limits):
        return group_of(self._make_one, limits, 2)

    def _make_one(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config, max_run_tokens=4), limits)

    def make_plain(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)


@pytest.mark.ci
class TestDraftsOfAGroup(DraftTests):
    def make(self, limits):
        return group_of(lambda own: SyntheticRunner(SyntheticConfig(pass_stamp=True), own), limits, 2)


@pytest.mark.nightly
class TestWorkers(test_synthetic.TestSynthetic):
    """Two processes that compare each step. What can go wrong with such processes: `test_workers.py`."""

    config = {**test_synthetic.TestSynthetic.config, "kv_shares": 4}  # noqa: RUF012

    def make(self, limits):
        return WorkerGroup(
            "synthetic",
            dict(self.config),
            msgspec.structs.replace(limits, tensor_parallel=2),
            close_deadline_s=120.0,
            exchange_deadline_s=300.0,
        )


@pytest.mark.parametrize(
    ("shares", "ranks", "parts"),
    [
        (4, 2, [(0, 2, True), (2, 2, True)]),
        (2, 2, [(0, 1, True), (1, 1, True)]),
        (1, 4, [(0, 1, True), (0, 1, False), (0, 1, False), (0, 1, False)]),
        (2, 4, [(0, 1, True), (0, 1, False), (1, 1, True), (1, 1, False)]),
        (6, 1, [(0, 6, True)]),
    ],
)
def test_each_share_has_one_writer(shares, ranks, parts):
    assert [part_of(shares, ranks, rank) for rank in range(ranks)] == [Part(*part) for part in parts]
    written = [share for first, count, writes in parts if writes for share in range(first, first + count)]
    assert written == list(range(shares))


@pytest.mark.parametrize(("shares", "ranks"), [(3, 2), (2, 3), (4, 6)])
def test_shares_and_ranks_that_do_not_divide_are_refused(shares, ranks):
    with pytest.raises(ConfigError, match=f"{ranks} ranks cannot divide the {shares} shares.*works with 1") as caught:
        part_of(shares, ranks, 0)
    works = [int(width) for width in caught.value.hint.split("with ")[1].split(", ")]
    assert works == {2: [1, 2, 4, 6, 8], 3: [1, 3, 6], 4: [1, 2, 4, 8]}[shares]
    for width in works:
        part_of(shares, width, width - 1)


@pytest.mark.parametrize(("shares", "ranks", "rank"), [(4, 2, 2), (4, 2, -1), (4, 0, 0), (4, -2, 0), (0, 1, 0)])
def test_ranks_and_shares_that_there_are_not_have_no_part(shares, ranks, rank):
    with pytest.raises(InvariantBroken, match=f"rank {rank} of {ranks} in {shares} shares"):
        part_of(shares, ranks, rank)
