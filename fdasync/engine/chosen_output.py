"""The positions that indexers chose, on the engine's side: what a request takes of memory, and its samples' arrays.

Each sample has a region of its own (`runner/chosen.py`). The first sample has the rows of the whole prompt; the others
begin with the prompt's last token, which every sample computes, and take the rows before it from the first: none of
them starts before all steps that write these rows are planned (`Sequence.wants_room`). When a sample has ended and is
read, its rows are copied, slice by slice, and the regions are freed. A region counts against the engine's limit for as
long as it is there: until the caller has taken its request's last result, or let go of the request. Knows no blocks and
no scheduling. Called by `prepare.py`, `frontend.py`, `output.py` and `request_state.py`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.result import ChosenPositions
from fdasync.runner.chosen import ChosenRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from fdasync.request import SamplingParams
    from fdasync.runner.chosen import ChosenShape

# copied between two turns of the loop
_SLICE_NBYTES = 4 << 20


def chosen_starts(params: SamplingParams, prompt_tokens: int) -> tuple[int, ...]:
    """For each sample, the first position whose row is its own; (): the request wants none."""
    start = params.chosen_positions_start
    if start is None:
        return ()
    return start, *[max(start, prompt_tokens - 1)] * (params.n - 1)


def _most(params: SamplingParams, prompt_tokens: int) -> list[tuple[int, int]]:
    """For each sample, the position of its first row, and how many it may have: the last token is never forwarded."""
    stop = prompt_tokens + params.max_tokens - 1
    return [(start, stop - start) for start in chosen_starts(params, prompt_tokens)]


def chosen_nbytes(shape: ChosenShape | None, params: SamplingParams, prompt_tokens: int) -> int:
    """Most bytes of all rows of a request."""
    return 0 if shape is None else sum(most for _, most in _most(params, prompt_tokens)) * shape.token_nbytes


def make_chosen(
    shape: ChosenShape, params: SamplingParams, prompt_tokens: int, freed: Callable[[int], None]
) -> list[ChosenOutput]:
    """The memory for each sample's rows. `freed`: called for each with its bytes, once its memory is freed.

    Raises OSError; nothing is left behind then, and `freed` was told of all bytes."""
    wanted = _most(params, prompt_tokens)
    made: list[ChosenRows] = []
    try:
        for start, most in wanted:
            made.append(ChosenRows.create(shape, start, most))
    except BaseException:
        for rows in made:
            rows.close_fd()
        freed(sum(most for _, most in wanted) * shape.token_nbytes)
        raise
    counts = [_Count(rows.nbytes, freed) for rows in made]
    outputs = [ChosenOutput(made[0], None, prompt_tokens, (counts[0],))]
    for rows, count in zip(made[1:], counts[1:], strict=True):
        outputs.append(ChosenOutput(rows, made[0], prompt_tokens, (counts[0], count)))
    return outputs


class _Count:
    """Bytes that count for as long as somebody refers to this."""

    def __init__(self, nbytes: int, freed: Callable[[int], None]) -> None:
        weakref.finalize(self, freed, nbytes).atexit = False


class ChosenOutput:
    """The rows of one sample.

    Attributes:
        start: position of the first row that it gets.
    """

    def __init__(
        self, rows: ChosenRows, first: ChosenRows | None, prompt_tokens: int, counts: tuple[_Count, ...]
    ) -> None:
        """`rows`: its own, which the runner writes; `first`: the first sample's, None: this is the first; `counts`: of
        both."""
        self.start = rows.start if first is None else first.start
        self._rows: ChosenRows | None = rows
        self._first = first
        self._counts = counts
        self._shape = rows.shape
        self._prompt_tokens = prompt_tokens
        # position behind the last row that it gets; None: it has not ended
        self._stop: int | None = None
        self._copied = 0
        self._array: NDArray[np.int32] = np.empty((0, len(self._shape.layer_ids), self._shape.top_k), np.int32)

    @property
    def rows(self) -> ChosenRows:
        """What the runner is lent. Raises InvariantBroken once it is copied."""
        if self._rows is None:
            raise InvariantBroken("the memory of chosen positions is wanted, which was freed")
        return self._rows

    def check(self, num_tokens: int) -> None:
        """Raises InvariantBroken where rows of a sample of so many tokens are missing: its own rows, or the rows that
        it takes from the first sample."""
        # numbers alone: the error refers to this frame, and must not keep the memory
        stop, stands, begins = self._prompt_tokens + num_tokens - 1, self.rows.start + self.rows.count, self.rows.start
        shared = begins if self._first is None else self._first.start + self._first.count
        if num_tokens and shared < begins:
            raise InvariantBroken(f"chosen positions came up to position {shared}, and {begins} were to be shared")
        if num_tokens and stands < stop:
            raise InvariantBroken(f"chosen positions came up to position {stands}, and {stop} were computed")

    def end(self, num_tokens: int) -> None:
        """The sample has ended with so many tokens: its rows may be copied."""
        self._stop = self._prompt_tokens + num_tokens - 1

    def copying(self) -> Iterator[None]:
        """Copy the rows of a sample that has ended, a slice for each item; what was begun before goes on."""
        while self._stop is not None and self._rows is not None and self._copy(self._rows, self._stop):
            yield

    def _copy(self, rows: ChosenRows, stop: int) -> bool:
        """Copy the next rows before position `stop`, as far as they stand. Behind the last of them the shared ones go,
        and the result is False."""
        own = rows.rows[: rows.count]
        views = [own]
        if self._first is not None:
            # of the prompt before its last token
            shared = self._first.rows[: rows.start - self.start]
            stands = self._first.count
            views = [shared, own] if stands >= len(shared) else [shared[:stands]]
        if not self._copied:
            most = min(sum(map(len, views)), max(stop - self.start, 0))
            self._array = np.empty((most, *own.shape[1:]), np.int32)
        left = max(_SLICE_NBYTES // self._shape.token_nbytes, 1)
        first = 0
        for view in views:
            part = view[max(self._copied - first, 0) :][: min(left, len(self._array) - self._copied)]
            self._array[self._copied : self._copied + len(part)] = part
            self._copied += len(part)
            left -= len(part)
            first += len(view)
        if self._copied < len(self._array):
            return True
        self._free()
        return False

    def value(self) -> ChosenPositions:
        """What a result has: no row before the sample's end, or where the engine's failure was its end."""
        for _ in self.copying():
            pass
        return ChosenPositions(array=self._array, start=self.start, layer_ids=self._shape.layer_ids)

    def let_go(self) -> None:
        """The runner was lent the rows for the last time. The rows of a sample that has ended stay until whoever reads
        it copies them; a sample that did not end gives none. Idempotent."""
        if self._stop is None:
            self._free()

    def _free(self) -> None:
        if self._rows is not None:
            self._rows.close_fd()
        self._rows = self._first = None
        self._counts = ()
