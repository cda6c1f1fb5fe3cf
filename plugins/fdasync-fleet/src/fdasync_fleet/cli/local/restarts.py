"""Decides when a process that ended by itself is started again: soon at first, later each time, and not for ever.

Pure: its caller gives it the time; it starts nothing. Called by `up.py`, one object for each instance.
"""

from __future__ import annotations

import msgspec


class RestartRules(msgspec.Struct, frozen=True, kw_only=True):
    """How soon and how often a process is started again.

    Attributes:
        first_s: seconds until the first restart; twice as long each time after it.
        most_s: the longest wait.
        limit: restarts in a row at most; 0: none.
        steady_s: a process that took requests for so long has recovered, and its next restart is the first again.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    limit: int = 5
    steady_s: float = 300.0


class Restarts:
    """See the module.

    Attributes:
        count: restarts that were planned so far.
        due: the time of the next restart; None: none is planned.
        given_up: the process ended too often.
    """

    def __init__(self, rules: RestartRules) -> None:
        self.count = 0
        self.due: float | None = None
        self.given_up = False
        self._rules = rules
        self._in_a_row = 0

    def ended(self, now: float, ready_at: float | None) -> float | None:
        """Plan a restart of a process that ended, and took requests from `ready_at` on if ever. Returns the seconds
        until the restart, or None: the process is given up."""
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
        """Whether a restart is due; True once for each."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
