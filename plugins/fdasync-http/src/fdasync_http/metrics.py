"""`GET /metrics`: how busy the generator is, what its engines did, and what the front answered, for Prometheus.

Every number of every engine stands under its own name, with a label `engine`, and under vLLM's names. An engine tells
more in its own process, of its events (`fdasync.telemetry`). Called by `application.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from fdasync.errors import FdasyncError
from fdasync.telemetry.stats_metrics import stats_metrics
from fdasync.telemetry.vllm_names import vllm_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from fdasync.telemetry.sight.sight import Watched
    from fdasync_http.front import Front


async def metrics(_request: Request, front: Front) -> Response:
    """`GET /metrics`: figures for Prometheus; 200 also where the engine has failed."""
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
        yield GaugeMetricFamily("fdasync_http_live_requests", "Requests that have not ended.", load.live)
        yield GaugeMetricFamily("fdasync_http_instances", "Engines that serve.", facts.num_instances)
        # a counter of an engine that is away would stand still, and its gauges would be of before
        here = [(one, one.sight if one.is_up else None) for one in self._watched]
        told = [((one.name or one.address,), None if sight is None else sight.stats) for one, sight in here]
        yield from stats_metrics(("engine",), told)
        shown = [(one.name, sight) for one, sight in here if sight is not None]
        yield from vllm_metrics(shown, front.model, facts.block_tokens)
