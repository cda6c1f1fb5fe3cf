"""The plan of a step's recurrent states, for kernels: where each sequence's state is read, and where it goes.

The memory's first rows are the lanes' live states, the others the places of snapshots (`states.py`). Knows no modules
and no device. Called by `execution/device_step.py` and `device_executor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.gpu.kernels.recurrence.spans import FRESH, PlanSize, plan_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.model.recurrent.pieces import Take


def plan_size(sequences: int, step_tokens: int, block_tokens: int) -> PlanSize:
    """Enough for any step: a sequence leaves its state, a snapshot at a prompt's end and one where it branches, and
    others at ends of blocks."""
    return PlanSize(sequences, 3 * sequences + step_tokens // block_tokens)


def plan_states(
    size: PlanSize, batch: Batch, begun: Mapping[int, int], takes: Sequence[Take], num_lanes: int
) -> dict[str, NDArray[np.int32]]:
    """The arrays that are sent to the device for a step, by name.

    Args:
        begun: lanes whose sequences start in this step behind cached tokens: the place of the snapshot.
        takes: the step's snapshots.
        num_lanes: rows of the memory before the first place.

    Raises:
        InvariantBroken: a snapshot of tokens that the step does not compute, or two in one place.
    """
    sources = np.where(batch.starts == 0, FRESH, batch.lanes)
    number_of = {lane: number for number, lane in enumerate(batch.lanes.tolist())}
    for lane, place in begun.items():
        if lane in number_of:
            sources[number_of[lane]] = num_lanes + place
    kept = []
    for take in takes:
        number = number_of.get(take.lane)
        if number is None:
            raise InvariantBroken(f"step {batch.step_id} takes a snapshot of lane {take.lane}, and computes none of it")
        kept.append((number, take.position - int(batch.starts[number]), num_lanes + take.place))
    arrays = {"spans": plan_spans(size, sources, batch.counts, batch.lanes, kept)}
    if len(batch.lanes) != batch.num_decodes:
        arrays["owners"] = np.repeat(np.arange(len(batch.lanes), dtype=np.int32), batch.counts)
    return arrays
