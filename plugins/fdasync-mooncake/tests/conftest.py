"""What holds for every test here: a network of its own with a real pool in it, nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_mooncake.testing import LoopbackNamespace, MasterProcess, MemoryProcess, Server, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

# the test modules of this folder import `mooncake_bench`
sys.path.insert(0, str(Path(__file__).parent))
# in the processes that tests start: on few cores two threads each are many times slower than one
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A server of the wheel that ended by itself is not this plugin's failure: the test says so and is skipped, and the
    next one finds a pool again."""
    outcome: Any = yield
    report = outcome.get_result()
    servers = {id(server): server for server in getattr(item, "funcargs", {}).values() if isinstance(server, Server)}
    gone = {type(server).__name__: server.gone for server in servers.values() if server.gone is not None}
    if not gone:
        return
    if report.when == "call" and report.failed:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"ended by itself, with status: {gone}")
    if report.when == "teardown":
        for server in servers.values():
            server.kill()
        for server in sorted(servers.values(), key=lambda server: isinstance(server, MemoryProcess)):
            server.start()


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
def memory(master: MasterProcess) -> Iterator[MemoryProcess]:
    """A process that lends memory to the master's pool and does nothing else."""
    with MemoryProcess(master, 2 << 30) as process:
        yield process


@pytest.fixture(scope="module")
def pool(master: MasterProcess, memory: MemoryProcess) -> MasterProcess:
    """A master with memory in its pool."""
    del memory
    return master


@pytest.fixture
def nothing_left(no_leaks: None) -> None:
    """Leaks of the process fail the test that made them."""
