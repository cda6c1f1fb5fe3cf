"""The positions that indexers pick in a step, for sequences that want them: written to the memory lent for them.

They are written while the pass computes them, layer after layer: a token has hundreds of kilobytes of them. When the
step has ended, those stand that belong to tokens that do. Called as parts are (`step_part.py`), for a model with
indexers, in the process that samples.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync.runner.input_batch import Batch
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from fdasync.runner.base import StepOutput
    from fdasync.runner.chosen import LentRows, LentRun
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.execution.parts.step_part import StepWork


class Chosen(StepPart[list["LentRun"]]):
    """See the module. In front of the part that says where the rows of drafts are."""

    name = "chosen"

    def __init__(self, lent: LentRows, table: InputBatch) -> None:
        self._lent = lent
        self._table = table

    def plan(self, work: StepWork) -> PartWork[list[LentRun]] | None:
        # in host memory
        specs = [self._table.samplers[lane] for lane in work.batch.lanes.tolist()]
        wanted = any(spec is not None and spec.chosen_from >= 0 for spec in specs)
        return PartWork(self, []) if wanted else None

    def before(self, work: StepWork, own: PartWork[list[LentRun]]) -> None:
        work.tell = partial(self._write, work, own.plan)

    def _write(self, work: StepWork, runs: list[LentRun], number: int, picked: torch.Tensor) -> None:
        if not number:
            # only now it is known where the rows of drafts are
            runs.extend(self._lent.runs(_placed(work), self._table))
        values = picked.cpu().numpy()
        for run in runs:
            run.write(number, values)

    def read(
        self, work: StepWork, own: PartWork[list[LentRun]], fetched: Mapping[str, Any], output: StepOutput
    ) -> StepOutput:
        stands = None if work.settled is None else work.settled.stands
        for run in own.plan:
            stood = run.count if stands is None else int(stands[run.at : run.at + run.count].sum())
            if stood:
                run.rows.stand(run.position, stood)
        return output


def _placed(work: StepWork) -> Batch:
    """The step as it is computed, without padding in front of its tokens; by its rows."""
    lanes, starts = (work.sent[name].numpy().astype(np.int64) for name in ("lanes", "starts"))
    counts = np.diff(work.sent["first_rows"].numpy()).astype(np.int64)
    batch = Batch(work.batch.step_id, lanes, counts, 0)
    batch.starts = starts
    return batch
