"""Rows of aux data of a step: staged on the device, brought to the arena's slots once they are on the host.

Called as parts are (`step_part.py`). Of a group, rank 0 alone has an arena; the others stage rows for what ranks
compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.runner.base import StepOutput
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.capture.aux_data import AuxData
    from fdasync_transformers.execution.drafts.step_rows import Settled
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors


class AuxRows(StepPart[None]):
    """`arena`: None: rows are staged, and go nowhere."""

    name = "aux"

    def __init__(self, aux: AuxData, arena: AuxArena | None) -> None:
        self._aux = aux
        self._arena = arena

    def plan(self, work: StepWork) -> PartWork[None] | None:
        return PartWork(self, None) if work.total else None

    def passed(self, work: StepWork, own: PartWork[None]) -> Tensors:
        work.staged = self._aux.stage(work.total)
        return {} if self._arena is None else work.staged

    def read(self, work: StepWork, own: PartWork[None], fetched: Mapping[str, Any], output: StepOutput) -> StepOutput:
        if self._arena is not None:
            where: Batch | Settled = work.batch
            if work.settled is not None:
                where = work.settled
                fetched = {name: values[where.stands] for name, values in fetched.items()}
            self._arena.scatter(where.aux_index, where.generations, self._aux.read(fetched, where.positions))
        return output
