"""Joins a `Recorder` (`sight/recorder.py`) to an engine: its numbers now, the ends of its requests, its picks.

Decides nothing. Called by `engine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.sight.recorder import PickRecorder, PicksSoFar, Recorder
from fdasync.sight.sight import Sight

if TYPE_CHECKING:
    from fdasync.engine.driver import Driver
    from fdasync.engine.frontend import Frontend
    from fdasync.engine.request_state import RequestState
    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights import Weights

# cut, so that it crosses links whatever an exception says
_PROBLEM_CHARS = 4096


class Sights:
    """What an engine shows of itself.

    Attributes:
        recorder: put ticks in.
    """

    def __init__(self, runtime: Runtime, frontend: Frontend, weights: Weights, now: float) -> None:
        assert runtime.driver is not None
        self._runtime, self._frontend, self._weights = runtime, frontend, weights
        self._driver: Driver = runtime.driver
        layers = runtime.capacity.moe_layer_ids
        read = None if runtime.picks is None else self._read_picks
        self.recorder = Recorder(self._now, PickRecorder(read, layers, runtime.namespace, weights.version), now)

    def _read_picks(self) -> PicksSoFar:
        picks = self._runtime.picks
        assert picks is not None
        return PicksSoFar(picks.table.copy(), picks.rows, picks.counted)

    def weights_changed(self) -> None:
        """The weights in use, or their label, have changed."""
        self.recorder.picks.weights_changed(self._runtime.namespace, self._weights.version)

    def ended(self, request: RequestState) -> None:
        """A request has its end."""
        reasons = {"failed" if sample.finish is None else sample.finish.reason for sample in request.samples}
        failed = request.failure is not None or request.spoiled is not None
        reason = "failed" if failed else reasons.pop() if len(reasons) == 1 else "mixed"
        total_s = request.ended_at - request.started_at
        ttft_s = tpot_s = None
        if request.first_token_at is not None:
            ttft_s = request.first_token_at - request.started_at
            tokens = 0 if request.samples[0].finish is None else len(request.samples[0].finish.token_ids)
            if len(request.samples) == 1 and tokens > 1:
                tpot_s = (total_s - ttft_s) / (tokens - 1)
        self.recorder.ended(reason, total_s, ttft_s, tpot_s)

    def _now(self) -> Sight:
        driver, frontend, runtime = self._driver, self._frontend, self._runtime
        stats = driver.scheduler.stats()
        live = sum([len(sample.tokens) for request in runtime.processor.requests() for sample in request.samples])
        taps = runtime.taps.stats()
        host, store = stats.hit_tokens_host, stats.hit_tokens_store
        return Sight(
            state="paused" if stats.paused else "running",
            weight_version=self._weights.version,
            waiting_for_place=frontend.num_waiting,
            waiting=stats.waiting,
            running=stats.running,
            leased=stats.leased,
            hand_offs=stats.hand_offs,
            queued_tokens=stats.queued_tokens,
            steps_in_flight=driver.steps_in_flight,
            num_blocks=stats.num_blocks,
            idle_blocks=stats.idle_blocks,
            free_blocks=stats.free_blocks,
            num_host_blocks=stats.num_host_blocks,
            free_host_blocks=stats.free_host_blocks,
            num_slots=stats.num_slots,
            free_slots=stats.free_slots,
            writing_blocks=stats.writing,
            steps=stats.steps,
            tokens=stats.generated_tokens + live,
            prompt_tokens=stats.prompt_tokens,
            hits=(stats.hit_tokens - host - store, host, store),
            finished=stats.finished,
            preemptions=stats.preemptions,
            leases=(stats.leases_granted, stats.leases_denied, stats.leases_dropped),
            received_blocks=stats.received_blocks,
            store_problem=_cut(runtime.store_problem),
            tap_problem=_cut("; ".join([f"{tap.name}: {tap.problem}" for tap in taps if tap.problem])),
            dropped_events=sum([tap.dropped for tap in taps]),
        )


def _cut(text: str) -> str:
    return text[:_PROBLEM_CHARS].encode(errors="replace").decode()
