"""Scores of prompts in a step: log-probs of tokens that its chunks forward.

Called as parts are (`step_part.py`). Graphs keep no hidden states, so all ranks launch such a step operation by
operation; rank 0 alone scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.runner.prompt_scores import scored_runs
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.sampling.scoring import ScorePlan, compute_scores, plan_scores, read_scores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import StepOutput
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors
    from fdasync_transformers.model.head import Head


class Scores(StepPart[ScorePlan]):
    """`leads`: this rank scores."""

    name = "scores"

    def __init__(self, bound: Bound, head: Head, *, leads: bool) -> None:
        self._bound = bound
        self._head = head
        self._leads = leads

    def plan(self, work: StepWork) -> PartWork[ScorePlan] | None:
        plan = plan_scores(scored_runs(work.batch, self._bound.table))
        if plan is None:
            return None
        work.by_operations, work.keeps_hidden = True, work.keeps_hidden or self._leads
        return PartWork(self, plan, plan.arrays) if self._leads else None

    def passed(self, work: StepWork, own: PartWork[ScorePlan]) -> Tensors:
        return compute_scores(lambda rows: self._bound.trim(self._head.logits(rows)), own.plan, own.sent)

    def read(
        self, work: StepWork, own: PartWork[ScorePlan], fetched: Mapping[str, Any], output: StepOutput
    ) -> StepOutput:
        # what cached blocks score comes first
        return msgspec.structs.replace(output, scores=(*output.scores, *read_scores(own.plan, fetched)))
