"""The matchers of the sequences in the runner, by lane, and the matchers for one step's samples.

Knows steps and lanes; a matcher's grammar is `sampling/grammars.py`'s. Called by `grammars.py`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.sampling.grammars import Grammars, Matcher


class StepMatchers:
    """The matchers of one step's sampled rows; they stay the step's when lanes change hands.

    Attributes:
        rows: which of the step's samples have one, ascending.
    """

    def __init__(self, rows: list[int], matchers: list[Matcher], counts: list[int], words: int) -> None:
        """`counts`: tokens of each answer before the one to sample."""
        self.rows = rows
        self._matchers = matchers
        self._counts = counts
        self._words = words

    @property
    def is_ready(self) -> bool:
        """Whether every matcher has taken all tokens before the one to sample."""
        return all(matcher.count >= count for matcher, count in zip(self._matchers, self._counts, strict=True))

    def masks(self) -> NDArray[np.int32]:
        """The masks, int32 [rows, words]."""
        masks = np.empty((len(self.rows), self._words), np.int32)
        for mask, matcher in zip(masks, self._matchers, strict=True):
            matcher.fill(mask)
        return masks

    def accept(self, tokens: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """The step sampled these tokens, one for each of its rows. Returns `StepOutput.problems`."""
        problems = []
        for row, matcher in zip(self.rows, self._matchers, strict=True):
            matcher.accept(tokens[row])
            if matcher.problem and not matcher.told:
                matcher.told = True
                problems.append((matcher.key, matcher.problem))
        return tuple(problems)


class LaneMatchers:
    """The matchers of the sequences in the runner, by lane.

    Args:
        grammars: None where the model has none: then no sequence may ask for one.
    """

    def __init__(self, grammars: Grammars | None, table: InputBatch) -> None:
        self._grammars = grammars
        self._table = table
        self._matchers: list[Matcher | None] = [None] * len(table.samplers)

    def follow(self, step: RunStep) -> None:
        """Take on the sequences that enter, after the table planned the step. A resumed one's matcher is built anew of
        the tokens so far."""
        for start in step.starts:
            matcher = None
            if start.sampler.grammar:
                if self._grammars is None:
                    raise InvariantBroken(f"sequence {start.key} asks for a grammar, and the model has none")
                answer = array("i", start.tokens)[start.sampler.prompt_len :]
                matcher = self._grammars.matcher(start.key, start.sampler.grammar, answer)
            self._matchers[self._table.lane_of(start.key)] = matcher

    def of(self, lanes: NDArray[np.int64]) -> StepMatchers | None:
        """The matchers of the sequences that a step samples, by their lanes; None: none of them has a grammar."""
        found = [(row, lane, matcher) for row, lane in enumerate(lanes.tolist()) if (matcher := self._matchers[lane])]
        if not found or self._grammars is None:
            return None
        table = self._table
        counts = [
            int(table.length[lane]) - sampler.prompt_len
            for _, lane, _ in found
            if (sampler := table.samplers[lane]) is not None
        ]
        rows, matchers = [row for row, _, _ in found], [matcher for _, _, matcher in found]
        return StepMatchers(rows, matchers, counts, self._grammars.words)
