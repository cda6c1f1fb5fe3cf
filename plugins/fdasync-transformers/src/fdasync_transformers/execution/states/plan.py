"""The plan of a step's recurrent states, for kernels: where each sequence's state is read, and where it goes.

The memory's first rows are the lanes' live states, `versions` of each, the others the places of snapshots
(`states.py`). Knows no modules and no device. Called by `execution/device_step.py` and `device_states.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from fdasync_kernels.recurrence.spans import FRESH, PlanSize, plan_spans

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.model.recurrent.pieces import Take
    from fdasync_transformers.model.recurrent.states import States


def plan_size(sequences: int, rows: int, step_tokens: int, block_tokens: int) -> PlanSize:
    """Enough for any step: a sequence leaves its state behind each of the `rows` that decode, a snapshot at a prompt's
    end and one where it branches, and others at ends of blocks."""
    return PlanSize(sequences, rows + 3 * sequences + step_tokens // block_tokens)


class Spanned(NamedTuple):
    """The sequences of a step that have tokens in it, int64 [S] each; the first `decodes` decode.

    Attributes:
        lanes: of each.
        starts: its leading tokens before the step; if it decodes with drafts, the least possible number.
        counts: its tokens of the step, drafts included.
    """

    lanes: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    decodes: int

    @classmethod
    def of(cls, batch: Batch, drafted: StepRows | None = None) -> Spanned:
        """`drafted`: how the batch was planned, if each row of a decode is a sequence in it."""
        if drafted is None:
            return cls(batch.lanes, batch.starts, batch.counts, batch.num_decodes)
        here, rows = drafted.widths > 0, batch.num_decodes
        return cls(
            np.concatenate([drafted.lanes[here], batch.lanes[rows:]]),
            np.concatenate([drafted.known[here], batch.starts[rows:]]),
            np.concatenate([drafted.widths[here], batch.counts[rows:]]),
            int(here.sum()),
        )


def plan_states(
    size: PlanSize, step: Spanned, begun: Mapping[int, int], takes: Sequence[Take], states: States
) -> dict[str, NDArray[np.int32]]:
    """The arrays that are sent to the device for a step, by name.

    Where lanes have several versions, decoding sequences are planned as if the first version were current; the device
    corrects that (`fdasync_kernels.recurrence.drafts`).

    Args:
        begun: lanes whose sequences start in this step behind cached tokens: the place of the snapshot.
        takes: the step's snapshots; where lanes have several versions, without decoding sequences' snapshots.

    Raises:
        InvariantBroken: a snapshot of tokens that the step does not compute, or two in one place.
    """
    versions, first_place = states.versions, states.first_place
    targets = step.lanes * versions
    sources = np.where(step.starts == 0, FRESH, targets)
    number_of = {lane: number for number, lane in enumerate(step.lanes.tolist())}
    for lane, place in begun.items():
        if lane in number_of:
            sources[number_of[lane]] = first_place + place
    kept = []
    for take in takes:
        number = number_of.get(take.lane)
        if number is None:
            raise InvariantBroken(f"a step takes a snapshot of lane {take.lane}, and computes none of it")
        kept.append((number, take.position - int(step.starts[number]), first_place + take.place))
    stops = np.array(kept, np.int64).reshape(-1, 3)
    if versions > 1:
        # a version behind each row but the last, whose is the state that goes on if all stand
        widths = step.counts[: step.decodes] - 1
        numbers = np.repeat(np.arange(step.decodes), widths)
        behind = np.arange(len(numbers)) - np.repeat(np.cumsum(widths) - widths, widths) + 1
        stops = np.concatenate([stops, np.stack([numbers, behind, targets[numbers] + behind], 1)])
        targets[: step.decodes] += widths + 1
    arrays = {"spans": plan_spans(size, sources, step.counts, targets, stops)}
    if versions > 1 or len(step.lanes) != step.decodes:
        arrays["owners"] = np.repeat(np.arange(len(step.lanes), dtype=np.int32), step.counts)
    return arrays
