"""Makes the `Sight` of one engine: of its numbers now, the ends of its requests, and what its runner's side counts.

Decides nothing. Made and called by `engine/engine.py`, which gives the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.telemetry.sight.recording.recorder import PickRecorder, PicksSoFar, Recorder
from fdasync.telemetry.sight.sight import Sight

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.picks import PickTable
    from fdasync.events.catalog import RequestEnded
    from fdasync.request import Doing
    from fdasync.scheduler import SchedulerStats

# cut, so that it crosses links whatever an exception says
_PROBLEM_CHARS = 4096


class Numbers(NamedTuple):
    """An engine's numbers, now.

    Attributes:
        stats: of its scheduler.
        doing: what it does.
        version, namespace: of the weights in use.
        waiting_for_place, steps_in_flight: as in `Sight`.
        live_tokens: sampled for requests that have not ended.
        store_problem, tap_problem, dropped_events: as in `Sight`; of any length.
    """

    stats: SchedulerStats
    doing: Doing
    version: str
    namespace: bytes
    waiting_for_place: int
    steps_in_flight: int
    live_tokens: int
    store_problem: str
    tap_problem: str
    dropped_events: int


class EngineSights:
    """See the module.

    Args:
        numbers: the engine's, now.
        picks: what the runner's side counts; None: nothing does, or no longer.
        layers: hidden-layer numbers of rows.
        now: time by the clock of `tick`.
    """

    def __init__(
        self, numbers: Callable[[], Numbers], picks: Callable[[], PickTable | None], layers: tuple[int, ...], now: float
    ) -> None:
        self._numbers = numbers
        self._picks = picks
        first = numbers()
        read = None if picks() is None else self._read_picks
        self._recorder = Recorder(self._now, PickRecorder(read, layers, first.namespace, first.version), now)

    def _read_picks(self) -> PicksSoFar | None:
        picks = self._picks()
        return None if picks is None else PicksSoFar(picks.table.copy(), picks.rows, picks.counted)

    def tick(self, now: float) -> None:
        """Time passes."""
        self._recorder.tick(now)

    def weights_changed(self) -> None:
        """The weights in use, or their label, have changed; no step was in flight where the weights did."""
        numbers = self._numbers()
        self._recorder.picks.weights_changed(numbers.namespace, numbers.version)

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

    def _now(self) -> Sight:
        numbers = self._numbers()
        stats = numbers.stats
        host, store = stats.hit_tokens_host, stats.hit_tokens_store
        return Sight(
            state=numbers.doing,
            weight_version=numbers.version,
            waiting_for_place=numbers.waiting_for_place,
            waiting=stats.waiting,
            running=stats.running,
            leased=stats.leased,
            hand_offs=stats.hand_offs,
            queued_tokens=stats.queued_tokens,
            steps_in_flight=numbers.steps_in_flight,
            num_blocks=stats.num_blocks,
            idle_blocks=stats.idle_blocks,
            free_blocks=stats.free_blocks,
            num_host_blocks=stats.num_host_blocks,
            free_host_blocks=stats.free_host_blocks,
            num_slots=stats.num_slots,
            free_slots=stats.free_slots,
            writing_blocks=stats.writing,
            steps=stats.steps,
            tokens=stats.generated_tokens + numbers.live_tokens,
            prompt_tokens=stats.prompt_tokens,
            hits=(stats.hit_tokens - host - store, host, store),
            finished=stats.finished,
            preemptions=stats.preemptions,
            leases=(stats.leases_granted, stats.leases_denied, stats.leases_dropped),
            received_blocks=stats.received_blocks,
            store_problem=_cut(numbers.store_problem),
            tap_problem=_cut(numbers.tap_problem),
            dropped_events=numbers.dropped_events,
        )


def _cut(text: str) -> str:
    return text[:_PROBLEM_CHARS].encode(errors="replace").decode()
