"""`GET /metrics`: how busy the generator is, what its engines did, and what the front answered, for Prometheus.

Engines stand under vLLM's names, and their states under the name that they have themselves. An engine has more of its
own in `fdasync.telemetry`, in its own process. Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from fdasync.errors import FdasyncError
from fdasync.telemetry.sight.sight import State
from fdasync.telemetry.vllm_names import vllm_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from fdasync.telemetry.sight.sight import Watched
    from fdasync_http.front import Front


_AWAY = "away"
_STATES: tuple[str, ...] = (*get_args(State), _AWAY)


async def metrics(_request: Request, front: Front) -> Response:
    """`GET /metrics`; 200 also where the engine has failed."""
    try:
        watched = await front.generator.watch()
    except FdasyncError:
        watched = ()
    registry = CollectorRegistry()
    registry.register(Figures(front, watched))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Figures(Collector):
    """What is known now."""

    def __init__(self, front: Front, watched: tuple[Watched, ...]) -> None:
        self._front, self._watched = front, watched

    def collect(self) -> Iterator[Metric]:
        front = self._front
        answers = CounterMetricFamily(
            "fdasync_http_answers", "Answers that were begun, by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(front.answers.items()):
            answers.add_metric((path, str(status)), count)
        yield answers
        yield GaugeMetricFamily("fdasync_http_generating", "Requests of this front that generate.", front.live)
        try:
            load, facts = front.generator.load(), front.generator.facts()
        except FdasyncError:
            yield GaugeMetricFamily("fdasync_http_engine_up", "Whether requests can be made.", 0)
            return
        yield GaugeMetricFamily("fdasync_http_engine_up", "Whether requests can be made.", 1)
        for name, words, value in (
            ("running_samples", "Samples that hold KV blocks.", load.running),
            ("waiting_samples", "Samples that wait to be computed.", load.waiting),
            ("live_requests", "Requests that have not ended.", load.live),
            ("used_tokens", "Tokens of KV blocks in use.", load.used_tokens),
            ("capacity_tokens", "Tokens of all KV blocks.", load.capacity_tokens),
            ("paused", "Whether no steps are planned.", int(load.paused)),
            ("instances", "Engines that serve.", facts.num_instances),
        ):
            yield GaugeMetricFamily(f"fdasync_http_{name}", words, value)
        version = GaugeMetricFamily("fdasync_http_weight_version", "1 for the weights in use.", labels=("version",))
        version.add_metric((facts.weight_version,), 1)
        yield version
        # a counter of an engine that is away would stand still, and its gauges would be of before
        shown = [(one.name, one.sight) for one in self._watched if one.is_up and one.sight is not None]
        states = GaugeMetricFamily("fdasync_engine_state", "1 for what the engine does.", labels=("engine", "state"))
        for one in self._watched:
            now = one.sight.state if one.is_up and one.sight is not None else _AWAY
            for state in _STATES:
                states.add_metric((one.name or one.address, state), float(state == now))
        yield states
        yield from vllm_metrics(shown, front.model, facts.block_tokens)
