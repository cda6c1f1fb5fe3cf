"""Grammars of a step: masks in front of its samples, and matchers that take these.

A mask depends on a sequence's last token. While that token is still on the device, the part is not ready. Called as
parts are (`step_part.py`), in the process that samples; in front of `samples.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_transformers.execution.parts.lane_matchers import StepMatchers
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.sampling.plan import MASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import StepOutput
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors


class Grammars(StepPart[StepMatchers]):
    """See the module."""

    name = "grammars"

    def __init__(self, matchers: LaneMatchers, services: GpuServices) -> None:
        self._matchers = matchers
        self._services = services

    def plan(self, work: StepWork) -> PartWork[StepMatchers] | None:
        self._matchers.follow(work.step)
        matchers = self._matchers.of(work.batch.lanes[work.batch.sampled]) if len(work.rows) else None
        return None if matchers is None else PartWork(self, matchers)

    def is_ready(self, plan: StepMatchers) -> bool:
        return plan.is_ready

    def after(self, work: StepWork, own: PartWork[StepMatchers]) -> Tensors:
        masks = {MASKS: own.plan.masks()}
        work.masks = self._services.send(masks, work.holds)
        return {}

    def read(
        self, work: StepWork, own: PartWork[StepMatchers], fetched: Mapping[str, Any], output: StepOutput
    ) -> StepOutput:
        # a sequence under a grammar has one row or none
        return msgspec.structs.replace(output, problems=own.plan.accept(work.sampled))
