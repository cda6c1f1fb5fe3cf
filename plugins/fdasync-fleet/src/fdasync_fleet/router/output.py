"""The output of one sample of a router's request: what its caller has not read yet, and all that it has read.

A router keeps what was read, so that an aborted request has all of its output. Once a delta was read, only its values
stay: as objects, the deltas of hundreds of long streams would make every round of the garbage collector stop the loop
for a tenth of a second. Knows no instances. Used by `router/request.py`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from fdasync.result import Delta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.result import FinishReason, TopLogprobs

T = TypeVar("T")


class RoutedOutput:
    """See the module.

    Args:
        index: number of the sample.
    """

    __slots__ = ("_finish_reason", "_index", "_processed", "_raw", "_texts", "_token_ids", "_top", "_unread")

    def __init__(self, index: int) -> None:
        self._index = index
        self._unread: list[Delta] = []
        # what was read
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._raw: list[float] | None = None
        self._processed: list[float] | None = None
        self._top: list[TopLogprobs | None] | None = None
        self._finish_reason: FinishReason | None = None

    def __bool__(self) -> bool:
        """Whether any output has come."""
        return bool(self._unread or self._token_ids or self._texts or self._finish_reason)

    @property
    def has_tokens(self) -> bool:
        return bool(self._token_ids) or any(delta.token_ids for delta in self._unread)

    def add(self, delta: Delta) -> None:
        self._unread.append(delta)

    def take(self, *, is_whole: bool) -> Delta | None:
        """All unread output as one delta; None: there is none.

        Args:
            is_whole: the sample's rows are there too; until they are, its last delta waits.
        """
        unread = self._unread
        rest: list[Delta] = []
        if unread and unread[-1].finish_reason is not None and not is_whole:
            unread, rest = unread[:-1], unread[-1:]
        if not unread:
            return None
        self._unread = rest
        delta = unread[0] if len(unread) == 1 else merged(unread)
        self._token_ids += delta.token_ids
        if delta.text:
            self._texts.append(delta.text)
        self._raw = _with(self._raw, delta.raw_logprobs)
        self._processed = _with(self._processed, delta.processed_logprobs)
        self._top = _with(self._top, delta.top_logprobs)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return delta

    def whole(self) -> Delta:
        """All output so far as one delta, read or not; what was not read stays unread."""
        read = Delta(
            index=self._index,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            raw_logprobs=None if self._raw is None else tuple(self._raw),
            processed_logprobs=None if self._processed is None else tuple(self._processed),
            top_logprobs=None if self._top is None else tuple(self._top),
            finish_reason=self._finish_reason,
        )
        return merged([read, *self._unread])


def _with(kept: list[T] | None, new: tuple[T, ...] | None) -> list[T] | None:
    if new is None:
        return kept
    if kept is None:
        return list(new)
    kept += new
    return kept


def merged(deltas: list[Delta]) -> Delta:
    """One delta for several deltas of the same sample, in order; at least one."""
    return Delta(
        index=deltas[0].index,
        token_ids=tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        text="".join([delta.text for delta in deltas]),
        raw_logprobs=_joined([delta.raw_logprobs for delta in deltas]),
        processed_logprobs=_joined([delta.processed_logprobs for delta in deltas]),
        top_logprobs=_joined([delta.top_logprobs for delta in deltas]),
        finish_reason=deltas[-1].finish_reason,
    )


def _joined(runs: Iterable[tuple[T, ...] | None]) -> tuple[T, ...] | None:
    """The runs one behind the other; None: there are none."""
    known = [run for run in runs if run is not None]
    return tuple(chain.from_iterable(known)) if known else None
