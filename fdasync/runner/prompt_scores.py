"""Log-probs of prompts: finds the tokens that a step scores, and collects what steps have scored.

`scored_runs` is for runners whose `Capacity.scores_prompts` is set: it says which rows of a planned batch have the
logits, and which tokens they score. The synthetic runner and plugins' runners call it once for each step.
`PromptLogprobs` collects the scores of one request, in an engine (`engine/output.py`) and where they cross from one
instance to the next (`pd`). Pure; knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.result import TopLogprobs
from fdasync.runner.base import PromptScores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch, InputBatch


@dataclass(frozen=True)
class ScoredRun:
    """The tokens that one chunk of a step scores.

    Attributes:
        key: the sequence.
        start: position of the first token scored.
        row: row of the step whose logits score that token; the next row scores the next token.
        tokens: int32 [n], the token ids scored; a view of the lane's tokens.
        top: how many alternatives beside each.
    """

    key: int
    start: int
    row: int
    tokens: NDArray[np.int32]
    top: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each token."""
        return np.arange(self.row, self.row + len(self.tokens))


def scored_runs(batch: Batch, table: InputBatch) -> list[ScoredRun]:
    """The runs of a step, after `table.plan`, in the order of its chunks; at most one for each chunk."""
    runs: list[ScoredRun] = []
    if len(batch.lanes) == batch.num_decodes:
        return runs
    firsts = np.cumsum(batch.counts) - batch.counts
    for number in range(batch.num_decodes, len(batch.lanes)):
        lane = int(batch.lanes[number])
        sampler = table.samplers[lane]
        if sampler is None or sampler.score_from < 0:
            continue
        # the token at a position is scored by the row of the position before it
        begin = int(batch.starts[number])
        start = max(begin + 1, sampler.score_from)
        stop = min(begin + int(batch.counts[number]) + 1, sampler.prompt_len)
        if start < stop:
            row = int(firsts[number]) + start - 1 - begin
            runs.append(ScoredRun(table.keys[lane], start, row, table.tokens[lane, start:stop], sampler.score_top))
    return runs


class PromptLogprobs:
    """Log-probs of one request's prompt, as they come: runs of positions, from steps or in messages of an instance.

    Attributes:
        start: position of the first token whose log-prob is wanted.
        top: how many alternatives beside each.
        latest: the latest pass over a position wins, and all behind it is computed again. False: the first completed
            pass wins, as for rows.
        stop: the position behind the last token that is scored.
    """

    __slots__ = ("_runs", "latest", "start", "stop", "top")

    def __init__(self, start: int, top: int, *, latest: bool = False) -> None:
        self.start = start
        self.top = top
        self.latest = latest
        # no logits score the token at position 0
        self.stop = max(start, 1)
        self._runs: list[tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]] = []

    @classmethod
    def wanted(cls, start: int | None, top: int) -> PromptLogprobs | None:
        """The scores to collect for a request with `SamplingParams.prompt_logprobs_start` and `prompt_top_logprobs`."""
        return None if start is None else cls(start, top)

    def add(self, run: PromptScores) -> None:
        """Take a run. Raises InvariantBroken for a run that leaves a gap, whose numbers do not fit together, or which
        has NaN."""
        count, top = run.count, self.top
        sizes = len(run.logprobs), run.top, len(run.top_ids), len(run.top_logprobs)
        if sizes != (4 * count, top, 4 * count * top, 4 * count * top) or run.start > self.stop:
            problem = f"scores of {count} tokens from position {run.start} on, with {run.top} alternatives"
            raise InvariantBroken(f"{problem}; those from {self.stop} on were due, with {top}")
        if self.latest and run.start < self.stop:
            self._forget(run.start)
        seen = max(self.stop - run.start, 0)
        if seen >= count:
            return
        values = np.frombuffer(run.logprobs, "<f4")
        ids = np.frombuffer(run.top_ids, "<i4").reshape(count, top)
        best = np.frombuffer(run.top_logprobs, "<f4").reshape(count, top)
        if np.isnan(values).any() or np.isnan(best).any():
            raise InvariantBroken(f"scores from position {run.start} on have NaN")
        self._runs.append((values[seen:], ids[seen:], best[seen:]))
        self.stop = run.start + count

    def _forget(self, stop: int) -> None:
        """Drop what is known from this position on."""
        while self._runs and stop < self.stop:
            values, ids, best = self._runs.pop()
            first = self.stop - len(values)
            keep = max(stop - first, 0)
            if keep:
                self._runs.append((values[:keep], ids[:keep], best[:keep]))
            self.stop = first + keep

    def runs(self, most: int) -> Iterator[PromptScores]:
        """All runs again, each of at most so many tokens; their key is 0."""
        start = max(self.start, 1)
        for values, ids, best in self._runs:
            for first in range(0, len(values), most):
                part = slice(first, first + most)
                run = values[part], ids[part], best[part]
                yield PromptScores(
                    key=0,
                    start=start,
                    logprobs=run[0].tobytes(),
                    top=self.top,
                    top_ids=run[1].tobytes(),
                    top_logprobs=run[2].tobytes(),
                )
                start += len(run[0])

    def values(self) -> NDArray[np.float32]:
        """float32 [tokens scored], the caller's; NaN for position 0."""
        parts = [np.full(1, np.nan, np.float32)] if self.start == 0 else []
        return np.concatenate([*parts, *[run[0] for run in self._runs], np.zeros(0, np.float32)], dtype=np.float32)

    def alternatives(self) -> tuple[TopLogprobs | None, ...] | None:
        """The alternatives of each scored token, best first; None for position 0. None where none are wanted."""
        if not self.top:
            return None
        found: list[TopLogprobs | None] = [None] if self.start == 0 else []
        for _, ids, best in self._runs:
            for row, values in zip(ids.tolist(), best.tolist(), strict=True):
                count = row.index(-1) if -1 in row else len(row)
                found.append(TopLogprobs(tuple(row[:count]), tuple(values[:count])))
        return tuple(found)
