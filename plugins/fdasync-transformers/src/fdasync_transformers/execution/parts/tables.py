"""Two parts of every step: what changes in the device's tables, and, without drafts, where samples go in them.

Called as parts are (`step_part.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.execution.parts.step_part import PartWork, RowsPart, StepPart, StepWork

if TYPE_CHECKING:
    from fdasync_kernels.step_kernels import StepKernels

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.parts.step_part import Tensors


class Tables(StepPart[None]):
    """Brings block tables and known tokens on the device up to date."""

    name = "tables"

    def __init__(self, table: InputBatch, lanes: DeviceLanes, kernels: StepKernels) -> None:
        self._table = table
        self._lanes = lanes
        self._kernels = kernels

    def plan(self, work: StepWork) -> PartWork[None] | None:
        index, values = self._lanes.deltas(work.step, self._table)
        return PartWork(self, None, {"index": index, "values": values}) if len(index) else None

    def before(self, work: StepWork, own: PartWork[None]) -> None:
        self._kernels.scatter_updates(self._lanes.flat, own.sent["index"], own.sent["values"])

    def warm(self) -> None:
        nothing = torch.full((1,), -1, dtype=torch.int64, device=self._lanes.flat.device)
        self._kernels.scatter_updates(self._lanes.flat, nothing, nothing.to(torch.int32))


class PlainRows(RowsPart[None]):
    """Rows of steps without drafts. Each sequence has its tokens, and one sample where they end its known ones, which
    goes to where the next step reads it."""

    def __init__(self, table: InputBatch, lanes: DeviceLanes, kernels: StepKernels) -> None:
        self._table = table
        self._lanes = lanes
        self._kernels = kernels

    def begin(self, step: RunStep) -> StepWork:
        if step.drafts is not None:
            raise InvariantBroken(f"step {step.step_id} has drafts, and this runner verifies none")
        return StepWork(step, self._table.plan(step))

    def plan(self, work: StepWork) -> PartWork[None] | None:
        if not len(work.batch.sampled):
            return None
        sampling = work.batch.lanes[work.batch.sampled]
        return PartWork(self, None, {"next": self._lanes.after(sampling, self._table.length[sampling])})

    def after(self, work: StepWork, own: PartWork[None]) -> Tensors:
        if work.tokens is not None:
            self._kernels.scatter_updates(self._lanes.flat, own.sent["next"], work.tokens.to(torch.int32))
        return {}
