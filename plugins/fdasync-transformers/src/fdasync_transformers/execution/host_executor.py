"""Steps and copies on the CPU: each is done when the call returns, so nothing is ever in flight.

Belongs in a worker process: a forward pass blocks its loop. Knows no requests. Made by `runner.py` once the model is
loaded.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.gpu.block_rows import BlockRows
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync.runner.prompt_scores import scored_runs
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.mtp.drafter import MtpDrafter
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.parallel.in_step import share_step
from fdasync_transformers.sampling.sampler import sample
from fdasync_transformers.sampling.scoring import compute_scores, plan_scores, read_scores

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from fdasync.runner.base import PromptScores
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.sampling.scoring import ScorePlan

T = TypeVar("T")


class HostExecutor(Executor):
    """See the module and `Executor`."""

    def __init__(self, model: StepModel, bound: Bound) -> None:
        self._model = model
        self._bound = bound
        self._drafter = None if head_of(model.model) is None else MtpDrafter(model)
        self._compares = bound.collectives is not None and model.head.is_apart
        self._blocks = None if bound.host is None else BlockRows(bound.pool.blocks, bound.host, bound.part)
        self._failure = ""

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        return self._now(lambda: self._perform(step), step.step_id)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        return self._now(lambda: self._move(copy))

    async def aclose(self) -> None:
        self._failure = self._failure or "the runner is closed"

    def _now(self, work: Callable[[], T], step_id: int = -1) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._failure:
            future.set_exception(RunnerError(f"nothing more after a failure: {self._failure}", step_id))
            return future
        try:
            future.set_result(work())  # blocking: a CPU forward pass; the runner lives in a worker process
        except Exception as error:  # a model may raise anything, and a step must still end
            self._failure = f"{type(error).__name__}: {error}"
            failed = RunnerError(self._failure, step_id)
            failed.__cause__ = error
            future.set_exception(failed)
        return future

    def _perform(self, step: RunStep) -> StepOutput:
        bound = self._bound
        batch = bound.table.plan(step)
        leads = bound.collectives is None or not bound.collectives.rank
        if leads:
            bound.matchers.follow(step)
        for start in step.starts:
            column, offset = divmod(start.num_cached, bound.pool.block_tokens)
            if offset:
                # another instance computed the first tokens of this block, and the block was copied whole
                bound.pool.clear_past(start.blocks[column], offset)
        if not len(batch.positions):
            return StepOutput(step.step_id, ())
        rows = (np.cumsum(batch.counts) - 1)[batch.sampled]
        if not leads:
            return self._follow(batch)
        plan = plan_scores(scored_runs(batch, bound.table))
        scores: tuple[PromptScores, ...] = ()
        with self._keeping(plan):
            logits = self._model.run(batch, bound.table, bound.pool, rows)
            hidden = self._compared()
            if self._drafter is not None:
                # its KV alone: no step verifies drafts yet
                none = np.zeros_like(batch.counts)
                self._drafter.step(self._model.head.hidden, batch, batch.counts, none, bound.table, bound.pool)
            if plan is not None:
                scores = self._score(plan)
        values = None if bound.aux is None else bound.aux.rows(batch.positions)
        if values is not None and bound.arena is not None:
            bound.arena.scatter(batch.aux_index, batch.generations, values)
        output = self._sample(batch, logits) if len(rows) else StepOutput(step.step_id, ())
        if bound.collectives is not None:
            share_step(bound.collectives, step.step_id, values, hidden, np.array(output.tokens, np.int32))
        return msgspec.structs.replace(output, scores=scores) if scores else output

    def _follow(self, batch: Batch) -> StepOutput:
        """As another rank than the first: KV and rows, without logits; the tokens are those that rank 0 samples."""
        bound, collectives = self._bound, self._bound.collectives
        if collectives is None:
            raise InvariantBroken("a step of a group, and there is none")
        with self._keeping(None):
            self._model.run(batch, bound.table, bound.pool, np.zeros(0, np.int64))
            hidden = self._compared()
        values = None if bound.aux is None else bound.aux.rows(batch.positions)
        tokens = share_step(collectives, batch.step_id, values, hidden, np.zeros(0, np.int32))
        self._keep(batch, tokens)
        return StepOutput(batch.step_id, tuple(tokens.tolist()))

    def _keeping(self, plan: ScorePlan | None) -> AbstractContextManager[None]:
        """Keep the hidden states of the pass inside where prompts are scored, ranks compare them, or a drafter takes
        them."""
        keeps = plan is not None or self._compares or self._drafter is not None
        return self._model.head.keeping() if keeps else nullcontext()

    def _compared(self) -> torch.Tensor | None:
        """Of the pass, what the ranks of a group compare."""
        return self._model.head.hidden if self._compares else None

    def _score(self, plan: ScorePlan) -> tuple[PromptScores, ...]:
        device = self._model.model.device
        sent = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
        results = compute_scores(lambda rows: self._bound.trim(self._model.head.logits(rows)), plan, sent)
        return read_scores(plan, {name: values.cpu().numpy() for name, values in results.items()})

    def _sample(self, batch: Batch, logits: torch.Tensor) -> StepOutput:
        """Sample, and write the tokens to where the next step reads them."""
        table = self._bound.table
        lanes = batch.lanes[batch.sampled]
        positions = table.length[lanes]
        chosen = lanes.tolist()
        specs = [spec for lane in chosen if (spec := table.samplers[lane]) is not None]
        ends = positions.tolist()
        histories = [table.tokens[lane, :end] for lane, end in zip(chosen, ends, strict=True)]
        matchers = self._bound.matchers.of(lanes)
        masks = None if matchers is None else matchers.masks()
        out = sample(self._bound.trim(logits), specs, ends, histories, masks)
        self._keep(batch, np.array(out.tokens, np.int32))
        output = out.step_output(batch.step_id)
        if matchers is not None:
            output = msgspec.structs.replace(output, problems=matchers.accept(out.tokens))
        return output

    def _keep(self, batch: Batch, tokens: NDArray[np.int32]) -> None:
        """Write sampled tokens to where the next step reads them."""
        table = self._bound.table
        lanes = batch.lanes[batch.sampled]
        positions = table.length[lanes]
        # a sequence at the end of its context samples a token that no step will read
        kept = positions < table.tokens.shape[1]
        table.tokens[lanes[kept], positions[kept]] = tokens[kept]

    def _move(self, copy: SwapOut | SwapIn) -> CopyOutput:
        blocks, table, arena = self._blocks, self._bound.table, self._bound.arena
        if blocks is None:
            raise InvariantBroken("a copy, and there is no host tier")
        rows_before = arena.written_nbytes if arena is not None else 0
        if isinstance(copy, SwapOut):
            moved = blocks.out(copy.device, copy.host)
        else:
            moved = blocks.back(copy.host, copy.device)
            table.place(copy.device, copy.slots, copy.generations)
        rows = arena.written_nbytes - rows_before if arena is not None else 0
        return CopyOutput(copy.copy_id, moved, rows)
