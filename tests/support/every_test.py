"""What holds for every test of the core and of fleets: uvloop unless marked, nothing blocks a loop, nothing is left
behind. A `conftest.py` imports what it wants of it."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest
import uvloop

from fdasync.testing.harness.leaks import LeakFound
from tests.support.skips import SkippedSelectorLoop, SkippedUvloop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

_STDLIB_LOOPS = (asyncio.SelectorEventLoop, SkippedSelectorLoop)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for every test, the stdlib's too where a test is marked `both_loops`; `skips`: loops that skip time."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop,
    }  # fmt: skip
    if item.get_closest_marker("skips"):
        loops = {"uvloop": SkippedUvloop, "asyncio": SkippedSelectorLoop}
    return loops if item.get_closest_marker("both_loops") else {"uvloop": loops["uvloop"]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the stdlib's loop tests run in the second ring; tryfirst: before the marks choose."""
    for item in items:
        played = getattr(item, "callspec", None)
        if played is not None and played.params.get("_asyncio_loop_factory") in _STDLIB_LOOPS:
            item.add_marker(pytest.mark.ci)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, no_leaks: None, no_blocking: None) -> Iterator[None]:
    """Leaks of the process, and of the test's loop, and blocking calls fail the test that made them."""
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("no_tasks_left")
    return


@pytest.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    yield
    # of threads, files and memory `no_leaks` makes lists
    current = asyncio.current_task()
    left = sorted(f"task {task.get_name()} {task.get_coro()!r}" for task in asyncio.all_tasks() if task is not current)
    if left:
        raise LeakFound(left)
