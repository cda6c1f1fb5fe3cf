"""Estimates how long prefill, lookups and fetches take, from how long they took. Pure.

Fetching has bounded regret (docs/design.md, section 7): it is tried only where it should be faster than computing, and
waited for no longer than its own estimate plus a tenth of the estimated time of computing. The estimates are running
means that forget, so a store that became slow is soon known to be slow. This module knows no requests and no blocks.
`store_planner.py` asks it, and `results.py` gives it the speed of prefill.
"""

from __future__ import annotations

# the share of the estimated recompute time that waiting in vain may cost
REGRET_SHARE = 0.1
_WEIGHT = 0.25
_FADE = 0.99


class Mean:
    """A running mean that starts from a guess; the first measurement takes its place.

    Attributes:
        value: the mean so far.
    """

    __slots__ = ("_measured", "value")

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._measured = False

    def add(self, value: float) -> None:
        self.value = self.value + _WEIGHT * (value - self.value) if self._measured else value
        self._measured = True


class CostModel:
    """Estimates in seconds.

    Args:
        prefill_tokens_per_s, fetch_nbytes_per_s, lookup_s: the guesses before the first measurement.
    """

    def __init__(self, prefill_tokens_per_s: float, fetch_nbytes_per_s: float, lookup_s: float) -> None:
        # kept as seconds per unit: their mean is right, the mean of rates is not
        self._prefill = Mean(1.0 / prefill_tokens_per_s)
        self._fetch = Mean(1.0 / fetch_nbytes_per_s)
        self._lookup = Mean(lookup_s)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that prefilled this many tokens took so long."""
        self._prefill.add(seconds / num_tokens)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """So many bytes arrived in so long, counted from the question."""
        self._fetch.add(seconds / nbytes)

    def looked_up(self, seconds: float) -> None:
        self._lookup.add(seconds)

    def passed_over(self) -> None:
        """Computing was preferred, which measures nothing: lower the store's estimates, so that it is tried again."""
        self._fetch.value *= _FADE
        self._lookup.value *= _FADE

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self._prefill.value

    def fetch_s(self, nbytes: int) -> float:
        return nbytes * self._fetch.value

    @property
    def lookup_s(self) -> float:
        return self._lookup.value
