"""What a pause lets the scheduler do: nothing, or end the requests that have begun. Pure.

`core.py` decides what a pause does to the sequences of each state (docs/design.md, rule 36) and tells this module;
`step_planner.py` and both sides of `disagg/` ask it. It knows no queue and changes no sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.scheduler.state.sequence import Sequence


class Pausing:
    """See the module.

    Attributes:
        paused: no steps are planned.
        is_winding_down: sequences that had begun run to their end; no other one starts. Then steps are planned no more.
        requests: how many `PauseRequested` were read.
        sleep: of the device's memory: "" while it is in use; "begun" while blocks leave it; "deep" when none is left.
    """

    def __init__(self) -> None:
        self.paused = False
        self.is_winding_down = False
        self.requests = 0
        self.sleep: Literal["", "begun", "deep"] = ""
        self._finishing: dict[int, None] = {}
        self._since = 0.0

    def lets_begin(self, seq: Sequence) -> bool:
        """Whether the sequence may take blocks, and ask for a lease."""
        if self.is_winding_down:
            return seq.key in self._finishing
        return not self.paused

    def pause(self, now: float) -> None:
        """Plan no more steps from now on."""
        self._begin(now)
        self.paused = True
        self.is_winding_down = False

    def wind_down(self, begun: Iterable[Sequence], now: float) -> None:
        """Let these run to their end, then plan no more steps. While paused, nothing runs, so this changes nothing."""
        if not self.paused and not self.is_winding_down:
            self._begin(now)
            self.is_winding_down = True
            self._finishing = dict.fromkeys(seq.key for seq in begun)

    def _begin(self, now: float) -> None:
        if not self.paused and not self.is_winding_down:
            self._since = now

    def ended(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._finishing.pop(seq.key, None)

    def settle(self) -> None:
        """Called before steps are planned: a pause begins when the last sequence that it waited for has ended."""
        if self.is_winding_down and not self._finishing:
            self.paused = True
            self.is_winding_down = False

    def resume(self, now: float) -> float:
        """Undo any pause; returns for how many seconds it held sequences up."""
        held_s = now - self._since if self.paused or self.is_winding_down else 0.0
        self.paused = self.is_winding_down = False
        self.sleep = ""
        return held_s
