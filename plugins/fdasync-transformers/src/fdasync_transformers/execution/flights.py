"""Futures of steps and copies under way: steps end in the order of launch, and behind a failure nothing begins.

Knows no device and no model. Made and called by `executor.py`, from its loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.errors import RunnerError
from fdasync.gpu.completion import when_done

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Flights:
    """See the module.

    Attributes:
        problem: why nothing begins any more; "": there is no reason.
        last: the port's own future of the step launched last, which no caller can cancel; None: there was none. A step
            that cannot be launched fails behind it.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.last: asyncio.Future[Any] | None = None

    def begin(
        self, future: asyncio.Future[T], start: Callable[[], asyncio.Future[T] | None], step_id: int = -1
    ) -> None:
        """Call `start`, which queues the work of `future`, or will. It fails with RunnerError, and all behind it."""
        try:
            if self.problem:
                raise RunnerError(f"nothing more after a failure: {self.problem}")
            inner = start()
        except Exception as error:  # a model may raise anything, and a step must still end
            failed = self.failed(error, step_id)
            if future.done():
                return
            if step_id < 0 or self.last is None or self.last.done():
                future.set_exception(failed)
            else:
                self.last.add_done_callback(lambda _: None if future.done() else future.set_exception(failed))
        else:
            if inner is not None:
                self.follow(inner, future, step_id)

    def follow(self, inner: asyncio.Future[T], future: asyncio.Future[T], step_id: int) -> None:
        """End `future` with `inner`."""
        if step_id >= 0:
            self.last = inner
        when_done(inner, partial(self._ended, future, step_id))

    def _ended(self, future: asyncio.Future[T], step_id: int, inner: asyncio.Future[T]) -> None:
        error = asyncio.CancelledError() if inner.cancelled() else inner.exception()
        if error is not None:
            failed = self.failed(error, step_id)
            if not future.done():
                future.set_exception(failed)
        elif not future.done():
            future.set_result(inner.result())  # of a future that is done

    def failed(self, error: BaseException, step_id: int) -> RunnerError:
        """The error of this step or copy; from now on nothing begins."""
        if isinstance(error, RunnerError):
            failed = RunnerError(error.problem, step_id)
        else:
            failed = RunnerError(f"{type(error).__name__}: {error}", step_id)
        failed.__cause__ = error
        self.problem = self.problem or failed.problem
        return failed
