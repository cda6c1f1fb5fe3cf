"""The end of each step of a group: rank 0's samples go to all ranks, which compare what they computed.

The exchange is `parallel/on_device.py`'s. Called as parts are (`step_part.py`), behind `samples.py` and in front of
what follows from samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import StepOutput
    from fdasync_transformers.capture.aux_data import AuxData
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors
    from fdasync_transformers.parallel.on_device import StepEnds


class Ranks(StepPart[None]):
    """See the module."""

    name = "ranks"

    def __init__(self, ends: StepEnds, aux: AuxData) -> None:
        self._ends = ends
        self._aux = aux

    def plan(self, work: StepWork) -> PartWork[None] | None:
        return PartWork(self, None) if work.total else None

    def after(self, work: StepWork, own: PartWork[None]) -> Tensors:
        batch, count = work.batch, len(work.batch.sampled)
        padding = None if work.placed is None else work.sent["lanes"][: batch.num_decodes] < 0
        logits = None if work.passed is None else work.passed.logits
        told = self._ends.queue(batch.step_id, work.staged, logits, work.tokens, count, padding)
        work.tokens = self._ends.tokens(told, count) if count else None
        return {"told": told}

    def read(self, work: StepWork, own: PartWork[None], fetched: Mapping[str, Any], output: StepOutput) -> StepOutput:
        # in host memory, as all that was fetched
        tokens = self._ends.read(fetched["told"], output.step_id, len(work.batch.sampled))
        if work.settled is not None:
            tokens = tokens[work.settled.samples]
        return msgspec.structs.replace(output, tokens=tuple(tokens.tolist()))

    def warm(self) -> None:
        self._ends.queue(0, self._aux.stage(0), None, None, 0)
