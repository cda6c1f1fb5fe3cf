"""What holds for every test here, and the options of simulations of fleets."""

from __future__ import annotations

import os

import pytest

from fdasync.testing.pytest_plugin import SimSeeds, seeds_of
from tests.support.every_test import (
    no_tasks_left,
    nothing_left,
    pytest_asyncio_loop_factories,
    pytest_collection_modifyitems,
)

__all__ = ["no_tasks_left", "nothing_left", "pytest_asyncio_loop_factories", "pytest_collection_modifyitems"]

# torch in the processes that tests start: on few cores two threads each are many times slower than one
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fdasync")
    group.addoption("--pd-seed", type=int, default=None, metavar="S", help="simulate this one seed of a fleet")
    group.addoption("--pd-seeds", type=int, default=None, metavar="N", help="simulate fleets of seeds 0 to N-1")


@pytest.fixture
def pd_seeds(request: pytest.FixtureRequest) -> SimSeeds:
    """Seeds of fleets to simulate; see `sim_seeds`."""
    return seeds_of(request.config, "--pd-seed", "--pd-seeds", "fleets of ")
