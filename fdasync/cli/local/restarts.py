"""When a process that ended by itself is started again: soon at first, later each time, and not for ever. Pure.

Told what happened and what time it is; starts nothing. Used by `up.py`, one for each instance.
"""

from __future__ import annotations

import msgspec


class RestartRules(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    first_s, most_s: until it is started again, the first time and at most; twice as long each time.
    limit: so many times at most, without a life of `steady_s` in between. 0: never.
    steady_s: one that took requests for so long has recovered, and what was before does not count any more.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    limit: int = 5
    steady_s: float = 300.0


class Restarts:
    """See the module.

    Attributes:
        count: how often it was to be started again so far.
        due: when it shall be; None: it is there, or will not be.
        given_up: it ended too often.
    """

    def __init__(self, rules: RestartRules) -> None:
        self.count = 0
        self.due: float | None = None
        self.given_up = False
        self._rules = rules
        self._in_a_row = 0

    def ended(self, now: float, ready_at: float | None) -> float | None:
        """It ended, having taken requests since `ready_at` if ever; for how long to wait, or None: it is given up."""
        rules = self._rules
        if ready_at is not None and now - ready_at >= rules.steady_s:
            self._in_a_row = 0
        if self._in_a_row >= rules.limit:
            self.given_up = True
            return None
        wait_s = min(rules.first_s * (1 << self._in_a_row), rules.most_s)
        self._in_a_row += 1
        self.count += 1
        self.due = now + wait_s
        return wait_s

    def take(self, now: float) -> bool:
        """Whether to start it now; asked as often as one likes, True once."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
