"""Scores of prompts over cached blocks: log-probs of tokens that no chunk forwards, where final hidden states are kept.

A block that a sequence starts on has the final hidden state of each of its tokens among its rows (`final_hidden`). So
only the head runs over them. Their rows may be on their way to the host, from the step before: then the part is not
ready. Called as parts are (`step_part.py`), in the process that samples and has the rows' arena; behind `scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync.cache.aux import FINAL_HIDDEN
from fdasync.errors import BuffersOut, InvariantBroken
from fdasync.runner.prompt_scores import ScoredRun
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.sampling.scoring import SCORE_ROWS, plan_scores, read_scores, score_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.events.actions import SeqStart
    from fdasync.runner.base import StepOutput
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors
    from fdasync_transformers.model.head import Head
    from fdasync_transformers.sampling.scoring import ScorePlan


@dataclass(frozen=True)
class _Rows:
    """Where the states that score a run lie: rows [offset, offset + count) of these slots, one behind the other."""

    slots: list[int]
    generations: list[int]
    offset: int
    count: int


@dataclass
class Kept:
    """Attributes:
    scores: rows count the states of all runs, in their order.
    where: of each run.
    states: uint8 [rows, bytes of a state]; None: not read yet.
    """

    scores: ScorePlan
    where: list[_Rows]
    states: NDArray[np.uint8] | None = None


class KeptScores(StepPart[Kept]):
    """See the module."""

    name = "kept"

    def __init__(self, bound: Bound, arena: AuxArena, head: Head, dtype: torch.dtype, services: GpuServices) -> None:
        """`dtype`: of the states."""
        self._bound = bound
        self._arena = arena
        self._head = head
        self._dtype = dtype
        self._services = services

    def plan(self, work: StepWork) -> PartWork[Kept] | None:
        found = [self._of(start) for start in work.step.starts if start.num_cached and start.sampler.score_from >= 0]
        kept = [one for one in found if one is not None]
        first, runs = 0, []
        for start, tokens, where in kept:
            runs.append(ScoredRun(start.key, max(start.sampler.score_from, 1), first, tokens, start.sampler.score_top))
            first += where.count
        plan = plan_scores(runs)
        return None if plan is None else PartWork(self, Kept(plan, [where for *_, where in kept]), plan.arrays)

    def _of(self, start: SeqStart) -> tuple[SeqStart, NDArray[np.int32], _Rows] | None:
        """The tokens that cached states score: up to the one behind them."""
        size, table = self._bound.table.block_tokens, self._bound.table
        first, stop = max(start.sampler.score_from, 1), min(start.num_cached + 1, start.sampler.prompt_len)
        if first >= stop:
            return None
        # the token at a position is scored by the state of the position before it
        column, offset = divmod(first - 1, size)
        slots, generations = table.slots_of(np.array(start.blocks[column : -(-(stop - 1) // size)]))
        tokens = np.frombuffer(start.tokens, "<i4")[first:stop]
        # in host memory
        return start, tokens, _Rows(slots.tolist(), generations.tolist(), offset, stop - first)

    def is_ready(self, plan: Kept) -> bool:
        if plan.states is None:
            count = sum(one.count for one in plan.where)
            states = np.empty((count, *self._arena.rows[FINAL_HIDDEN].shape[1:]), np.uint8)
            at = 0
            try:
                for one in plan.where:
                    into = {FINAL_HIDDEN: states}
                    self._arena.copy_rows(one.slots, one.generations, one.offset, one.count, into, at)
                    at += one.count
            except InvariantBroken:
                return False
            plan.states = states.reshape(count, -1)
        return True

    def after(self, work: StepWork, own: PartWork[Kept]) -> Tensors:
        states, scores = own.plan.states, own.plan.scores
        assert states is not None
        parts: list[Tensors] = []
        # a piece at a time: logits and copies stay bounded, however long a hit is
        for first in range(0, len(states), SCORE_ROWS):
            part = slice(first, first + SCORE_ROWS)
            sent = self._sent(states[part], work).view(self._dtype)
            logits = self._bound.trim(self._head.logits_of(sent))
            parts.append(score_rows(logits, own.sent["targets"][part], scores.top))
            del logits
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _sent(self, states: NDArray[np.uint8], work: StepWork) -> torch.Tensor:
        try:
            return self._services.send({"states": states}, work.holds)["states"]
        except BuffersOut:
            # of a copy that is not page-locked the device is waited for, which is better than to fail
            return torch.from_numpy(states).to(self._services.streams.device)

    def read(self, work: StepWork, own: PartWork[Kept], fetched: Mapping[str, Any], output: StepOutput) -> StepOutput:
        return msgspec.structs.replace(output, scores=read_scores(own.plan.scores, fetched))
