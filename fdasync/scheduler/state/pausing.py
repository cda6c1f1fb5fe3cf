"""What a pause lets the scheduler do: nothing, or end the requests that have begun. Pure.

`core.py` decides what a pause does to the sequences of each state (docs/design.md, rule 36) and tells this module;
`step_planner.py` and both sides of `disagg/` ask it. It knows no queue and changes no sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.events.catalog import ResumeRequested
    from fdasync.scheduler.state.sequence import Sequence

Stage = Literal["running", "winding_down", "paused", "clearing", "clear"]
#: stages in which no steps are planned
PAUSED: tuple[Stage, ...] = ("paused", "clearing", "clear")


class Pausing:
    """See the module.

    Attributes:
        stage: "winding_down": sequences that had begun run to their end, no other one starts, and then it is "paused":
            no steps are planned. "clearing": likewise, and blocks leave the device for a sleep; "clear": none is left.
        requests: how many `PauseRequested` were read.
        held_s: for how many seconds the last pause that was undone held sequences up.
    """

    def __init__(self) -> None:
        self.stage: Stage = "running"
        self.requests = 0
        self.held_s = 0.0
        self._finishing: dict[int, None] = {}
        self._since = 0.0

    @property
    def paused(self) -> bool:
        """No steps are planned."""
        return self.stage in PAUSED

    def lets_begin(self, seq: Sequence) -> bool:
        """Whether the sequence may take blocks, and ask for a lease."""
        return self.stage == "running" or (self.stage == "winding_down" and seq.key in self._finishing)

    def pause(self, now: float) -> None:
        """Plan no more steps from now on."""
        if not self.paused:
            self._begin("paused", now)

    def wind_down(self, begun: Iterable[Sequence], now: float) -> None:
        """Let these run to their end, then plan no more steps. While paused, nothing runs, so this changes nothing."""
        if self.stage == "running":
            self._begin("winding_down", now)
            self._finishing = dict.fromkeys(seq.key for seq in begun)

    def clear(self, now: float) -> None:
        """Pause, and have blocks leave the device, unless none is left."""
        self.pause(now)
        if self.stage == "paused":
            self.stage = "clearing"

    def cleared(self) -> None:
        """No block is left on the device."""
        self.stage = "clear"

    def ended(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._finishing.pop(seq.key, None)

    def settle(self) -> bool:
        """Called before steps are planned: a pause begins when the last sequence that it waited for has ended. Whether
        it has begun now."""
        begins = self.stage == "winding_down" and not self._finishing
        if begins:
            self.stage = "paused"
        return begins

    def resume(self, event: ResumeRequested) -> None:
        """Undo any pause."""
        self.held_s = event.at - self._since if self.stage != "running" else 0.0
        self.stage = "running"

    def _begin(self, stage: Stage, now: float) -> None:
        if self.stage == "running":
            self._since = now
        self.stage = stage
