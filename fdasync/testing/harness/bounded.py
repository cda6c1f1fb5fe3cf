"""Runs each async test of a conformance suite on a loop of its own, with a limit, and fails it for tasks left behind.

Knows nothing of what is tested. Used by the suites for stores, transports, runners and completion ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

# how long the tasks that a test left may take to end once they are cancelled
_AFTER_S = 120.0

T = TypeVar("T")
S = TypeVar("S", bound="LoopHooks")


class LoopHooks:
    """How the tests of a suite run.

    Attributes:
        limit_s: how long one test may take, in seconds. It bounds hangs alone: busy machines are slow.
    """

    limit_s = 600.0

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of one test. `fdasync.testing.SimLoop()`, where nothing outside of the loop is needed: it is faster,
        and finds at once what waits for ever."""
        import uvloop

        return uvloop.new_event_loop()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test on a new loop, within `limit_s`."""
        run_bounded(self.new_loop(), test, self.limit_s)


def on_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An async test method as a plain one: see `LoopHooks.run`."""

    @functools.wraps(test)
    def run(self: S) -> None:
        self.run(test(self))

    # pytest must see a plain function, whatever plugin looks for coroutines
    del run.__wrapped__
    return run


def run_bounded(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run to its end on a loop of its own, which is closed whatever hangs. Raises AssertionError at the limit."""
    task = loop.create_task(main, name="the test")
    try:
        loop.run_until_complete(asyncio.wait([task], timeout=limit_s))
        if not task.done():
            raise AssertionError(f"the test did not end within {limit_s:g} s: {_places(loop)}")
        result = task.result()
        loop.run_until_complete(turns(10))
        if asyncio.all_tasks(loop):
            raise AssertionError(f"tasks were left behind: {_places(loop)}")
        return result
    finally:
        end_loop(loop)


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left, wait for it for a while, close."""
    left = asyncio.all_tasks(loop)
    for each in left:
        each.cancel()
    # a deadlock in virtual time has ended the test already, and was reported
    with contextlib.suppress(RuntimeError):
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_AFTER_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    for each in left:
        _ = not each.done() or each.cancelled() or each.exception()
    loop.close()


async def turns(count: int) -> None:
    """Let the loop turn so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def moment(when: float) -> None:
    """Let so many turns of the loop (int) or seconds (float) pass."""
    if isinstance(when, int):
        await turns(when)
    else:
        await asyncio.sleep(when)


def span(when: float) -> str:
    """What `moment` lets pass, in words."""
    return f"{when} turns of the loop" if isinstance(when, int) else f"{when:g} s"


def skip(reason: str) -> NoReturn:
    """End this test as skipped."""
    import pytest

    pytest.skip(reason)


def _places(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        stack = task.get_stack(limit=1)
        where = f"{stack[-1].f_code.co_qualname} line {stack[-1].f_lineno}" if stack else "nowhere"
        lines.append(f"{task.get_name()} in {where}")
    return ", ".join(sorted(lines))
