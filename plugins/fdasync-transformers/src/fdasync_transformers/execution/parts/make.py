"""The parts of a runner's steps, by what its model has and what it was bound to. The executor knows their order alone.

Called by `device_executor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_transformers.execution.drafts.device_drafts import DeviceDrafts
from fdasync_transformers.execution.drafts.own_drafts import OwnDrafts
from fdasync_transformers.execution.parts.aux_rows import AuxRows
from fdasync_transformers.execution.parts.grammars import Grammars
from fdasync_transformers.execution.parts.ranks import Ranks
from fdasync_transformers.execution.parts.samples import Samples
from fdasync_transformers.execution.parts.scores import Scores
from fdasync_transformers.execution.parts.tables import PlainRows, Tables
from fdasync_transformers.execution.states.device_states import DeviceStates
from fdasync_transformers.parallel.on_device import StepEnds

if TYPE_CHECKING:
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.device_step import DeviceStepModel
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.parts.step_part import RowsPart, StepPart


def make_parts(
    model: DeviceStepModel, bound: Bound, lanes: DeviceLanes, services: GpuServices
) -> tuple[RowsPart[Any], tuple[StepPart[Any], ...]]:
    """The part that lays out rows, and all parts, in the order in which they plan and queue."""
    group, own = bound.collectives, model.mtp is not None
    # of a group rank 0 alone samples, scores prompts, follows grammars and has the rows' arena
    leads = group is None or not group.rank
    rows: RowsPart[Any] = DeviceDrafts(bound, lanes, own=own) if bound.speculation else PlainRows(bound.table, lanes)
    parts: list[StepPart[Any]] = [Tables(bound.table, lanes), AuxRows(bound.aux, bound.arena)]
    if leads:
        parts += [Grammars(bound.matchers, services), Samples(bound, lanes, model.model.dtype)]
    if group is not None:
        parts.append(Ranks(StepEnds(group, services.streams.device), bound.aux))
    parts.append(rows)
    if model.states is not None and model.plan_size is not None:
        parts.append(DeviceStates(model.states, model.plan_size, bound.table))
    if own:
        parts.append(OwnDrafts(model, bound, lanes, services.graph_memory))
    parts.append(Scores(bound, model.head, leads=leads))
    return rows, tuple(parts)
