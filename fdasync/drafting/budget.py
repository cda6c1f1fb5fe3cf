"""How many drafts each sequence gets in the next step: as many as make more tokens in a second.

A draft is one more row of the step. The rows of a step have a measured price. A draft has the running acceptance of its
sequence: `reach * acceptance ** j` is the chance that the j-th draft counts. The best set of drafts is the one with the
highest ratio of expected tokens to the price of its rows. No drafts are planned where that ratio does not rise, and
none before the price of the plain step is known.

Numbers in, numbers out: the module knows no sequence, no drafter and no clock. `planning.py` calls it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# a price is the median of so many last steps: a stalled step must not count, nor a step that verifies drafts of a plan
# from before the number of drafts changed
_MEASURED = 5
_BUCKETS = 96
# drafts must give so many times the tokens that their rows cost
_MARGIN = 1.1
# drafts that are all but sure count as this sure
_SUREST = 0.99
# a gain that is no larger than this share of the tokens is none, even where rows cost nothing
_LEAST = 1e-9


class StepPrices:
    """What steps cost by their rows, from steps that only decode: a median for each quarter of a power of two."""

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[float, int]]] = {}
        # the medians, and their rows
        self._rows = np.zeros(_BUCKETS)
        self._seconds = np.zeros(_BUCKETS)

    def measure(self, rows: int, seconds: float) -> bool:
        """A step of so many rows, at least 1, took so long. False: that is no time, and ignored."""
        if not 0 < seconds < float("inf"):
            return False
        bucket = _bucket(rows)
        last = self._last.setdefault(bucket, deque(maxlen=_MEASURED))
        last.append((seconds, rows))
        self._seconds[bucket], self._rows[bucket] = sorted(last)[(len(last) - 1) // 2]
        return True

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._last)

    def knows(self, rows: int, *, near: int = 0) -> bool:
        """Whether a step of about so many rows was measured, up to `near` quarters of a power of two away."""
        bucket = _bucket(rows)
        return bool(self._seconds[max(bucket - near, 0) : bucket + near + 1].any())

    def of(self, rows: Ints) -> Floats:
        """Seconds of steps of these rows, rising: by straight lines through the medians, the last one prolonged. Where
        one is known alone, more rows cost in proportion. At least one step was measured."""
        known = np.flatnonzero(self._seconds)
        # a price from long ago may be above the price of more rows, measured since
        medians = np.minimum.accumulate(self._seconds[known][::-1])[::-1]
        at = self._rows[known]
        if len(known) == 1:
            alone: Floats = np.maximum(rows / at[0], 1.0) * medians[0]
            return alone
        # over a long stretch: neighbours differ by noise
        far = max(int(np.searchsorted(at, at[-1] / 2, "right")) - 1, 0)
        slope = float(medians[-1] - medians[far]) / float(at[-1] - at[far])
        seconds: Floats = np.interp(rows, at, medians) + slope * np.maximum(rows - at[-1], 0.0)
        return seconds


def choose_drafts(acceptance: Floats, reach: Floats, most: int, prices: StepPrices, running: int) -> Ints:
    """Drafts for each of `len(acceptance)` sequences that have a path, from 0 to `most`: the set of the highest rate.

    Args:
        acceptance: the chance of each sequence that a draft equals the token, given that those before it did.
        reach: the chance of each that its path still fits when its step begins; 1 where no step is in flight.
        running: how many sequences the step decodes, those without a path included; at least as many.
    """
    many = len(acceptance)
    if not many or not most or not prices.knows(running):
        return np.zeros(many, np.int64)
    grid = np.empty((many, most))
    grid[:, 0] = np.minimum(acceptance, _SUREST) * reach
    grid[:, 1:] = np.minimum(acceptance, _SUREST)[:, None]
    # the chance that the j-th draft counts, which falls with j: the likeliest drafts are always a head of each path
    chances = np.cumprod(grid, axis=1).ravel()
    order = np.argsort(-chances, kind="stable")
    costs = prices.of(np.arange(running, running + len(order) + 1))
    gains = np.cumsum(chances[order])
    best = int(np.argmax((running + gains) / costs[1:]))
    # both as shares of the plain step: a few paths among many sequences are worth their rows too
    paid = gains[best] / running
    if paid <= max(_MARGIN * (costs[best + 1] / costs[0] - 1), _LEAST):
        return np.zeros(many, np.int64)
    return np.bincount(order[: best + 1] // most, minlength=many)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a step with so many drafts of a sequence gives of it on average, between 1 and `drafts + 1`."""
    return float(drafts + 1) if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def _bucket(rows: int) -> int:
    """Four for each power of two: a plain step and one with drafts must not share a price where they are few."""
    shift = max(rows.bit_length() - 3, 0)
    return min(4 * shift + (rows >> shift), _BUCKETS - 1)
