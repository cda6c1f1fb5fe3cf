"""Futures for callers that may have left: they fail without a warning that no caller read the error.

Knows nothing of the work. Called by pools (`peers/pool.py`), by their rows, and by groups of runners.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


def failed(error: Exception) -> asyncio.Future[Any]:
    """A future of the running loop that has this error."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fail(future, error)
    return future


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future that is not done."""
    future.set_exception(error)
    # counts as read: the caller may have left
    future.exception()


def pass_on(ended: asyncio.Future[T], future: asyncio.Future[T], cancelled: Exception) -> None:
    """End `future` as `ended` has ended, with the error `cancelled` where `ended` was cancelled. Does nothing if
    `future` is done: its caller has left."""
    error = cancelled if ended.cancelled() else ended.exception()
    if future.done():
        return
    if error is None:
        future.set_result(ended.result())  # it is done
    else:
        fail(future, error)
