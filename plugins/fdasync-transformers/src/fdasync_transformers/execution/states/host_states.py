"""Recurrent state on a CPU, as far as the steps of a runner deal with it.

Steps go on from the first version of a lane's state. Where a step verifies drafts, the model's pass leaves a version
behind each row; the samples say which one goes on, and which snapshots of sequences that decode are taken. Knows no
layers and no tokens. Called as parts are (`parts/step_part.py`), for a model whose recurrent layers no kernel computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.model.recurrent.pieces import Take

if TYPE_CHECKING:
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors
    from fdasync_transformers.model.recurrent.states import States


class HostStates(StepPart[dict[int, list[Take]]]):
    """Its plan: snapshots by lane that wait for the samples."""

    name = "states"

    def __init__(self, states: States, table: InputBatch) -> None:
        self._states = states
        self._table = table

    def plan(self, work: StepWork) -> PartWork[dict[int, list[Take]]]:
        """Raises InvariantBroken for starts that cannot be."""
        for start in work.step.starts:
            self._states.check_start(start.snapshot, start.num_cached)
        takes = [Take(self._table.lane_of(take.key), take.position, take.place) for take in work.step.snapshots]
        # in host memory, as all of a device that is a CPU
        decodes = set() if work.drafted is None else set(work.drafted.lanes.tolist())
        later: dict[int, list[Take]] = {}
        for take in takes:
            if take.lane in decodes:
                later.setdefault(take.lane, []).append(take)
        work.takes = tuple(take for take in takes if take.lane not in decodes)
        return PartWork(self, later)

    def before(self, work: StepWork, own: PartWork[dict[int, list[Take]]]) -> None:
        del own
        for start in work.step.starts:
            if start.snapshot >= 0:
                self._states.begin(self._table.lane_of(start.key), start.snapshot)

    def after(self, work: StepWork, own: PartWork[dict[int, list[Take]]]) -> Tensors:
        if work.accepted is not None and work.drafted is not None:
            told = work.accepted.told
            # likewise
            columns = (told["starts"].tolist(), told["used"].tolist(), told["counts"].tolist())
            for lane, start, width, stood in zip(work.drafted.lanes.tolist(), *columns, strict=False):
                for take in own.plan.get(lane, ()):
                    behind = take.position - start
                    if 0 < behind <= stood:
                        self._states.take_version(lane, behind if width > 1 else 0, take.place)
                if width > 1:
                    self._states.settle(lane, stood)
        return {}
