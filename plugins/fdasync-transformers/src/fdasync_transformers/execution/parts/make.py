"""The parts of a runner's steps, by what its model has and what it was bound to. The executor knows their order alone.

Called by `executor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.cache.aux import FINAL_HIDDEN
from fdasync_transformers.execution.drafts.device_drafts import DeviceDrafts
from fdasync_transformers.execution.drafts.own_drafts import OwnDrafts
from fdasync_transformers.execution.parts.aux_rows import AuxRows
from fdasync_transformers.execution.parts.chosen import Chosen
from fdasync_transformers.execution.parts.clean_blocks import CleanBlocks
from fdasync_transformers.execution.parts.grammars import Grammars
from fdasync_transformers.execution.parts.kept_scores import KeptScores
from fdasync_transformers.execution.parts.processors import Processors
from fdasync_transformers.execution.parts.ranks import Ranks
from fdasync_transformers.execution.parts.samples import Samples
from fdasync_transformers.execution.parts.scores import Scores
from fdasync_transformers.execution.parts.tables import PlainRows, Tables
from fdasync_transformers.execution.states.device_states import DeviceStates
from fdasync_transformers.execution.states.host_states import HostStates
from fdasync_transformers.parallel.on_device import StepEnds

if TYPE_CHECKING:
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.parts.step_part import RowsPart, StepPart
    from fdasync_transformers.execution.step import StepModel


def make_parts(
    model: StepModel, bound: Bound, lanes: DeviceLanes, services: GpuServices
) -> tuple[RowsPart[Any], tuple[StepPart[Any], ...]]:
    """The part that lays out rows, and all parts, in the order in which they plan and queue."""
    group, own, table, kernels = bound.collectives, model.mtp is not None, bound.table, model.kernels
    # of a group rank 0 alone samples, scores prompts, follows grammars and has the rows' arena
    leads = group is None or not group.rank
    rows: RowsPart[Any] = PlainRows(table, lanes, kernels)
    if bound.speculation:
        rows = DeviceDrafts(bound, lanes, kernels, own=own)
    parts: list[StepPart[Any]] = [Tables(table, lanes, kernels), AuxRows(bound.aux, bound.arena)]
    if not model.by_kernels:
        parts.append(CleanBlocks(bound.pool))
    if leads:
        if model.indexers is not None:
            parts.append(Chosen(bound.lent, table))
        if bound.processors:
            parts.append(Processors(bound, lanes))
        parts += [Grammars(bound.matchers, services), Samples(bound, lanes, model.model.dtype)]
    if group is not None:
        parts.append(Ranks(StepEnds(group, services.streams.device, kernels), bound.aux))
    parts.append(rows)
    if model.states is not None:
        size = model.plan_size
        parts.append(HostStates(model.states, table) if size is None else DeviceStates(model.states, size, table))
    if own:
        parts.append(OwnDrafts(model, bound, lanes, services.graph_memory))
    parts.append(Scores(bound, model.head, leads=leads))
    if bound.arena is not None and FINAL_HIDDEN in bound.arena.rows:
        parts.append(KeptScores(bound, bound.arena, model.head, model.model.dtype, services))
    return rows, tuple(parts)
