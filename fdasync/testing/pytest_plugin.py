"""The pytest plugin: virtual time, leak and blocking checks as fixtures, and the options of simulations.

No hook of it changes how a project's tests run, and it imports the rest of the package when a fixture is used. pytest
loads it by its entry point.

Fixtures:
    run_sim: `run_sim(coroutine)` runs it in virtual time and returns its result; `limit_s` ends it after so much of it.
    no_leaks: fails the test if it leaves fds, threads, children, shared segments or tasks behind.
    must_strike: `must_strike(store_or_runner)` returns its argument, and fails the test at its end if a fault that was
        injected there never struck.
    no_blocking: fails the test if anything blocks a loop (needs blockbuster).
    sim_seeds: the seeds to simulate; the summary of the run says which they were.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blockbuster import BlockBuster

_MIN_SEEDS = 40
_MIN_S = 6.0

# (file, function) that block on purpose, and say so
_MAY_BLOCK = (
    ("fdasync_fleet/link/address.py", "absolute"),
    ("fdasync_fleet/link/address.py", "remove_file"),
    ("fdasync/ipc/child.py", "__init__"),
    ("fdasync/ipc/child.py", "_reap"),
    ("fdasync/ipc/gpu_locks.py", "take"),
    ("fdasync/ipc/gpu_locks.py", "holders"),
    ("fdasync/ipc/gpus.py", "installed"),
    ("fdasync/registry/registry.py", "find"),
    ("fdasync/registry/registry.py", "_import"),
    ("fdasync/registry/registry.py", "_unfit"),
    ("fdasync/runner/synthetic/runner.py", "_read_folder"),
    ("fdasync/engine/runtime.py", "_load_tokenizer"),
)
# the harness itself: it runs between tests and inside them, never in an engine
_HARNESS = (
    ("fdasync/testing/harness/leaks.py", "now"),
    ("fdasync/testing/harness/leaks.py", "children"),
    ("fdasync/testing/harness/leaks.py", "native_threads"),
    ("fdasync/testing/sim/outside.py", "add_reader"),
    ("_pytest/assertion/rewrite.py", "exec_module"),
    ("_pytest/assertion/rewrite.py", "find_spec"),
    ("_pytest/warnings.py", "catch_warnings_for_item"),
    ("_pytest/_code/code.py", "getfuncargnames"),
    # a loop that ends joins the thread that has joined its executor's threads
    ("asyncio/runners.py", "close"),
    # the first line of a file that is traced
    ("coverage/collector.py", "lock_data"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fdasync", "simulations of fdasync")
    group.addoption(
        "--seeds",
        type=int,
        default=None,
        metavar="N",
        help=f"simulate seeds 0 to N-1 (default: for {_MIN_S:g} s, and at least {_MIN_SEEDS})",
    )
    group.addoption("--sim-seed", type=int, default=None, metavar="S", help="simulate this one seed")


@pytest.fixture
def run_sim() -> Callable[..., Any]:
    """Run a coroutine in virtual time; see `fdasync.testing.run_sim`."""
    from fdasync.testing.sim.loop import run_sim

    return run_sim


@pytest.fixture(scope="session")
def first_uvloop() -> None:
    """Make a first loop: libuv opens a pipe for signals with it and keeps the pipe, which is no test's leak."""
    import uvloop

    uvloop.new_event_loop().close()


@pytest.fixture
def no_leaks(first_uvloop: None) -> Iterator[None]:  # noqa: ARG001
    """Fail the test if it leaves anything behind; see `fdasync.testing.no_leaks`."""
    from fdasync.testing.harness.leaks import no_leaks

    with no_leaks():
        yield


class Strikes(Protocol):
    """An object with injected faults: `FaultyStore`, `FaultRunner`, `SimFabric`, a held engine."""

    def assert_struck(self) -> None: ...


T = TypeVar("T", bound=Strikes)


@pytest.fixture
def must_strike() -> Iterator[Callable[[T], T]]:
    """Fail the test at its end if a fault that it injected never struck: it passed because nothing happened."""
    with all_strike() as watch:
        yield watch


@contextmanager
def all_strike() -> Iterator[Callable[[T], T]]:
    """A function that returns its argument. At the end the faults of every argument must have struck, or
    AssertionError is raised; an error in the body is raised as it is."""
    watched: list[Strikes] = []

    def watch(thing: T) -> T:
        watched.append(thing)
        return thing

    yield watch
    for thing in watched:
        thing.assert_struck()


@pytest.fixture(scope="session")
def blocking_calls() -> BlockBuster:
    """What `no_blocking` looks for. Listing it takes longer than most tests, so it is done once."""
    return _blocking_calls()


@pytest.fixture
def no_blocking(blocking_calls: BlockBuster) -> Iterator[None]:
    """Fail the test if anything blocks a running loop."""
    with _forbidden(blocking_calls):
        yield


@contextmanager
def forbid_blocking() -> Iterator[None]:
    """Make blocking calls raise on a running loop, but for the few that say `# blocking:` in fdasync."""
    with _forbidden(_blocking_calls()):
        yield


def _blocking_calls() -> BlockBuster:
    from blockbuster import BlockBuster

    calls = BlockBuster()
    for function in calls.functions.values():
        for file, name in (*_MAY_BLOCK, *_HARNESS):
            function.can_block_in(file, name)
    return calls


@contextmanager
def _forbidden(calls: BlockBuster) -> Iterator[None]:
    calls.activate()
    try:
        yield
    finally:
        calls.deactivate()


class SimSeeds:
    """The seeds to simulate, in order, and the lines about them in the summary of the run.

    Attributes:
        what: the simulated thing, with a blank behind it, or "".
        tried: how many seeds were handed out.
        notes: further lines for the summary.
    """

    def __init__(self, only: int | None, count: int | None, what: str = "") -> None:
        self.what = what
        self.tried = 0
        self.notes: list[str] = []
        self._only = only
        self._count = count

    def __iter__(self) -> Iterator[int]:
        if self._only is not None:
            self.tried = 1
            yield self._only
            return
        started = time.monotonic()
        seed = 0
        while self._wants(seed, time.monotonic() - started):
            self.tried = seed + 1
            yield seed
            seed += 1

    def _wants(self, seed: int, spent_s: float) -> bool:
        if self._count is not None:
            return seed < self._count
        return seed < _MIN_SEEDS or spent_s < _MIN_S

    def summary(self) -> list[str]:
        which = f"seed {self._only}" if self._only is not None else f"{self.tried} seeds, 0 to {self.tried - 1}"
        return [f"simulated {self.what}{which}", *self.notes]


_SIM_SEEDS = pytest.StashKey[list[SimSeeds]]()
_SIM_LINES = pytest.StashKey[list[str]]()
_XDIST_KEY = "fdasync_simulation"


@pytest.fixture
def sim_seeds(request: pytest.FixtureRequest) -> SimSeeds:
    """Seeds to simulate, as the options say; the summary of the run names them."""
    return seeds_of(request.config, "--sim-seed", "--seeds")


def seeds_of(config: pytest.Config, only: str, count: str, what: str = "") -> SimSeeds:
    """Seeds as these two options say, named in the summary of the run as seeds of `what`."""
    seeds = SimSeeds(config.getoption(only), config.getoption(count), what)
    config.stash.setdefault(_SIM_SEEDS, []).append(seeds)
    return seeds


def _summary(config: pytest.Config) -> list[str]:
    return [line for seeds in config.stash.get(_SIM_SEEDS, []) if seeds.tried for line in seeds.summary()]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: hand the summary to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and (lines := _summary(session.config)):
        output[_XDIST_KEY] = lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the process of pytest-xdist that prints: take the summary."""
    lines = getattr(node, "workeroutput", {}).get(_XDIST_KEY)
    if lines:
        node.config.stash.setdefault(_SIM_LINES, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the simulated seeds, where there are any."""
    lines = _summary(config) or config.stash.get(_SIM_LINES, [])
    if lines:
        terminalreporter.section("simulation")
        for line in lines:
            terminalreporter.write_line(line)
