"""What holds for every test here: a network of its own with a real pool in it, nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fdasync_mooncake.testing import LenderProcess, LoopbackNamespace, MasterProcess, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

# the test modules of this folder import `mooncake_bench`
sys.path.insert(0, str(Path(__file__).parent))
# in the processes that tests start: on few cores two threads each are many times slower than one
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def namespace() -> Iterator[LoopbackNamespace]:
    """A network that has only loopback, where the ports of clients do no harm; skips where no pool can run."""
    if reason := why_not():
        pytest.skip(reason)
    namespace = LoopbackNamespace()
    yield namespace
    namespace.close()


@pytest.fixture(scope="module")
def network(namespace: LoopbackNamespace) -> Iterator[None]:
    """This module's tests run in it."""
    with namespace.entered():
        yield


@pytest.fixture(scope="module")
def master(network: None) -> Iterator[MasterProcess]:
    """A master that lives as long as the module's tests."""
    with MasterProcess() as master:
        yield master


@pytest.fixture(scope="module")
def pool(master: MasterProcess) -> Iterator[MasterProcess]:
    """The same with memory in it, lent by a process that does nothing else."""
    with LenderProcess(master, 2 << 30):
        yield master


@pytest.fixture
def nothing_left(no_leaks: None) -> None:
    """Leaks of the process fail the test that made them."""
