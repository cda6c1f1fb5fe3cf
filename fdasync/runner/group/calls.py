"""Calls that all ranks of a group were asked, until all have answered. Made by `group.py`; knows no runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from fdasync.ipc.futures import fail

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Call(Generic[T]):
    """See the module.

    Attributes:
        what: in words, as the engine names it.
        left: ranks that have not answered.
        done: the group's own future.
        answer: rank 0's.
        error: the first of any rank.
        nbytes: that the ranks moved so far.
    """

    __slots__ = ("answer", "done", "error", "left", "nbytes", "what")

    def __init__(self, what: str, ranks: int, done: asyncio.Future[T] | None = None) -> None:
        self.what = what
        self.left = set(range(ranks))
        self.done = done
        self.answer: T | None = None
        self.error: BaseException | None = None
        self.nbytes = 0

    def end(self) -> None:
        """End the future with the error or the answer, unless its caller has cancelled it."""
        if self.done is None or self.done.done():
            return
        if self.error is not None:
            fail(self.done, self.error)
        else:
            assert self.answer is not None
            self.done.set_result(self.answer)
