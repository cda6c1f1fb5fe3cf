"""Makes the `Sight` of one engine: of its numbers now, the ends of its requests, and what its runner's side counts.

Decides nothing. Made and called by `engine/engine.py`, which gives the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.telemetry.sight.recording.recorder import PickRecorder, PicksSoFar, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.picks import PickTable
    from fdasync.events.catalog import RequestEnded
    from fdasync.stats import EngineStats
    from fdasync.telemetry.sight.sight import Sight


class EngineSights:
    """See the module.

    Args:
        stats: the engine's, now.
        weights: namespace and label of the weights in use.
        picks: what the runner's side counts; None: nothing does, or no longer.
        layers: hidden-layer numbers of rows.
        now: time by the clock of `tick`.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        weights: Callable[[], tuple[bytes, str]],
        picks: Callable[[], PickTable | None],
        layers: tuple[int, ...],
        now: float,
    ) -> None:
        self._weights = weights
        self._picks = picks
        read = None if picks() is None else self._read_picks
        self._recorder = Recorder(stats, PickRecorder(read, layers, *weights()), now)

    def _read_picks(self) -> PicksSoFar | None:
        picks = self._picks()
        return None if picks is None else PicksSoFar(picks.table.copy(), picks.rows, picks.counted)

    def tick(self, now: float) -> None:
        """Time passes."""
        self._recorder.tick(now)

    def weights_changed(self) -> None:
        """The weights in use, or their label, have changed; no step was in flight where the weights did."""
        self._recorder.picks.weights_changed(*self._weights())

    def ended(self, event: RequestEnded) -> None:
        """A request has its end."""
        reasons = set(event.reasons)
        reason = "failed" if event.error else reasons.pop() if len(reasons) == 1 else "mixed"
        token_s = None
        if event.ttft_s is not None and len(event.reasons) == 1 and event.output_tokens > 1:
            token_s = (event.total_s - event.ttft_s) / (event.output_tokens - 1)
        self._recorder.ended(reason, event.total_s, event.ttft_s, token_s)

    def sight(self, since: int = 0, *, past_picks: bool = True) -> Sight:
        """See `Recorder.sight`."""
        return self._recorder.sight(since, past_picks=past_picks)
