"""How many tokens the runner's own drafter drafts behind each step: as many as make more tokens in a second.

Every sequence of a step gets as many, so a number of drafts has one price at a number of running sequences: what steps
take that draft and verify so many. It is measured and not modelled, since the passes of a drafter cost what rows do not
tell. How often the first draft is right, the second one behind a right first one and so on, is a running mean over all
sequences. A number that was never played near the present number of sequences is tried for some steps; later the best
of the others is, ever more rarely while nothing comes of it.

Numbers in, numbers out: it knows no sequence, no drafter and no clock. Called by `fdasync.scheduler.drafts`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fdasync.drafting.budget import StepPrices

if TYPE_CHECKING:
    from collections.abc import Sequence

# the acceptance of a depth is a mean over about so many verdicts, the last ones; at first over two that are imagined
_MOST_VERDICTS = 200.0
_FIRST_ACCEPTANCE, _FIRST_VERDICTS = 0.5, 2.0
# steps of a try, of which those count that verify what such a step has drafted
_TRY_STEPS = 8
# steps between tries of what is not played: the interval doubles while they change nothing
_TRY_EVERY, _TRY_EVERY_AT_MOST = 256, 2048
# drafts must give so many times the tokens of the plain step
_MARGIN = 1.02


class _Flight(NamedTuple):
    """A planned step: it drafts so many behind it, and verifies what the step before drafted."""

    drafts: int
    steady: bool
    running: int


class OwnBudget:
    """See the module. One `plan` for each planned step and one `done` for each completed one, in the same order.

    Args:
        most: the most drafts of a sequence in a step, at least 1.
    """

    def __init__(self, most: int) -> None:
        numbers = range(most + 1) if most <= 4 else [0, *[1 << bit for bit in range(most.bit_length())], most]
        self._choices = sorted(set(numbers))
        self._prices = {number: StepPrices() for number in self._choices}
        # where each was measured last: by the octave of the number that ran
        self._played: dict[int, set[int]] = {number: set() for number in self._choices}
        self._acceptance = np.full(most, _FIRST_ACCEPTANCE)
        self._verdicts = np.full(most, _FIRST_VERDICTS)
        self._flights: deque[_Flight] = deque()
        self._last = 0
        self._trying = 0
        self._left = 0
        self._planned = 0
        self._try_at, self._try_every = _TRY_EVERY, _TRY_EVERY
        self._best = 0

    def plan(self, running: int) -> int:
        """Drafts behind the next step, which decodes so many sequences."""
        # a step of prompts alone: they decode in the next one
        drafts = self._choose(running) if running else self._best
        self._planned += 1
        self._flights.append(_Flight(drafts, drafts == self._last, running))
        self._last = drafts
        return drafts

    def done(self, drafts: Sequence[int], counts: Sequence[int], seconds: float | None) -> None:
        """The oldest step in flight completed.

        Args:
            drafts, counts: of each sequence that decoded: drafts that were verified, and tokens that the step gave.
            seconds: what the step took, if it did nothing but decode, and verified none but these drafts.
        """
        flight = self._flights.popleft()
        forwarded = np.array(drafts, np.int64)
        right = np.clip(np.array(counts, np.int64) - 1, 0, forwarded)
        if seconds is not None and flight.steady and flight.running:
            self._prices[flight.drafts].measure(flight.running, seconds)
            self._played[flight.drafts].add(_octave(flight.running))
        for depth in range(len(self._acceptance)):
            tried = int(((right >= depth) & (forwarded > depth)).sum())
            if not tried:
                break
            known, right_here = self._verdicts[depth], int((right > depth).sum())
            self._acceptance[depth] = (self._acceptance[depth] * known + right_here) / (known + tried)
            self._verdicts[depth] = min(known + tried, _MOST_VERDICTS)

    def expected_tokens(self, drafts: int) -> float:
        """Tokens that a step with so many drafts of a sequence gives of it on average."""
        return 1.0 + float(np.cumprod(self._acceptance[:drafts]).sum())

    def _choose(self, running: int) -> int:
        if self._left:
            self._left -= 1
            return self._trying
        octave = _octave(running)
        # the plain step first: what it gives is what drafts are held against
        for number in self._choices:
            if octave not in self._played[number]:
                return self._try(number)
        rates = {number: self._rate(number, running) for number in self._choices}
        best = max(self._choices, key=lambda number: rates[number] / (_MARGIN if number else 1.0))
        if best != self._best:
            self._try_every = _TRY_EVERY
            self._try_at = min(self._try_at, self._planned + _TRY_EVERY)
        self._best = best
        if self._planned >= self._try_at:
            self._try_every = min(2 * self._try_every, _TRY_EVERY_AT_MOST)
            self._try_at = self._planned + self._try_every
            return self._try(max([number for number in self._choices if number != best], key=rates.__getitem__))
        return best

    def _try(self, number: int) -> int:
        self._trying, self._left = number, _TRY_STEPS - 1
        return number

    def _rate(self, number: int, running: int) -> float:
        """Tokens a second of each sequence."""
        seconds = float(self._prices[number].of(np.array([running]))[0])
        return self.expected_tokens(number) / seconds


def _octave(running: int) -> int:
    return running.bit_length()
