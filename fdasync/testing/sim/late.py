"""An event loop in virtual time that comes late, as on a busy machine: several timers are due in one turn.

In a `SimLoop` every timer has a moment of its own, and all that follows from it is done before the next. A machine
under load holds a loop up, and the loop then meets many events at once. Some bugs show only there. Called by tests, as
`run_sim(main, LateLoop(seed))`.
"""

from __future__ import annotations

from random import Random

from fdasync.testing.sim.loop import SimLoop

# a share of the waits, by up to so much
_SHARE = 0.3
_LATE_S = (0.0005, 0.002, 0.01, 0.03)


class LateLoop(SimLoop):
    """See the module.

    Args:
        seed: says which waits last longer than they should, and how much longer.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def nothing_ready(self, timeout: float | None) -> None:
        super().nothing_ready(timeout)
        if timeout and self._random.random() < _SHARE:
            self.pass_time(self._random.random() * self._random.choice(_LATE_S))
