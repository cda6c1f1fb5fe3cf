"""How many tokens the runner's own drafter drafts behind each step: as many as make more tokens in a second.

Every sequence of a step gets as many (docs/design.md, rule 43), so a number of drafts has one price at a number of
running sequences: what steps take that draft and verify so many. It is measured and not modelled, since the passes of a
drafter cost what rows do not tell. How often the first draft is right, the second one behind a right first one and so
on, is a running mean over all sequences. A number that was never played is tried for some steps, and so are none and
the best near a new number of sequences; later the others are looked at in turn, ever more rarely while nothing changes.
Where steps tell no times, since all of them compute prompts too, the most are drafted as long as they are often right.

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
# steps of as many sequences up to a factor of 2 have one price: so many quarters of a power of two
_NEAR = 4
# steps of the first try of a number, and of a later look
_TRY_STEPS, _LOOK_STEPS = 6, 4
# steps between looks: the interval doubles while they change nothing
_LOOK_EVERY, _LOOK_EVERY_AT_MOST = 64, 1024
# so many tries in a row that showed no time, and the acceptance from which on drafts are made all the same
_BLIND_TRIES, _BLIND_ACCEPTANCE = 3, 0.3
# steps that go on with a number before all are weighed again
_WEIGH_EVERY = 8
# drafts must give so many times the tokens of the plain step
_MARGIN = 1.02


class _Flight(NamedTuple):
    """A planned step: how many it drafts behind it."""

    drafts: int
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
        self._acceptance = np.full(most, _FIRST_ACCEPTANCE)
        self._verdicts = np.full(most, _FIRST_VERDICTS)
        self._flights: deque[_Flight] = deque()
        # a try or a look that goes on, and whose turn it is next
        self._trying = self._left = self._turn = 0
        self._planned = 0
        self._look_at, self._look_every = _LOOK_EVERY, _LOOK_EVERY
        self._weigh_at = 0
        # tries since the last step that told its time
        self._blind = 0
        self._best = 0

    def plan(self, running: int) -> int:
        """Drafts behind the next step, which decodes so many sequences."""
        # a step of prompts alone: they decode in the next one
        drafts = self._choose(running) if running else self._best
        self._planned += 1
        self._flights.append(_Flight(drafts, running))
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
        if seconds is not None and flight.running and self._prices[flight.drafts].measure(flight.running, seconds):
            self._blind = 0
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
        if self._planned < self._weigh_at:
            return self._best
        # the plain step first: what it gives is what drafts are held against
        for number in self._choices:
            prices = self._prices[number]
            if not (prices.knows(running, near=_NEAR) if number in (0, self._best) else prices.is_known):
                return self._try_blindly(number)
        at = np.array([running])
        rates = {
            number: self.expected_tokens(number) / float(self._prices[number].of(at)[0]) / (_MARGIN if number else 1.0)
            for number in self._choices
        }
        best = max(self._choices, key=rates.__getitem__)
        if best != self._best:
            self._look_every = _LOOK_EVERY
            self._look_at = min(self._look_at, self._planned + _LOOK_EVERY)
        self._best = best
        if self._planned < self._look_at:
            self._weigh_at = self._planned + _WEIGH_EVERY
            return best
        self._look_every = min(2 * self._look_every, _LOOK_EVERY_AT_MOST)
        self._look_at = self._planned + self._look_every
        others = [number for number in self._choices if number != best]
        self._turn += 1
        return self._try(others[self._turn % len(others)], _LOOK_STEPS)

    def _try_blindly(self, number: int) -> int:
        """A number without a price: it is tried, unless tries show none."""
        self._blind += 1
        if self._blind <= _BLIND_TRIES:
            return self._try(number, _TRY_STEPS)
        often = bool(self._acceptance[0] >= _BLIND_ACCEPTANCE)
        if self._planned >= self._look_at:
            self._look_at = self._planned + _LOOK_EVERY_AT_MOST
            often = True
        self._weigh_at = self._planned + _WEIGH_EVERY
        self._best = self._choices[-1] if often else 0
        return self._best

    def _try(self, number: int, steps: int) -> int:
        self._trying, self._left = number, steps - 1
        return number
