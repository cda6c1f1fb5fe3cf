"""Steps and copies on the CPU: each is done when the call returns, so nothing is ever in flight.

Belongs in a worker process: a forward pass blocks its loop. Knows no requests. Made by `bound_runner.py` once the model
is loaded.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.gpu.block_rows import BlockRows
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync.runner.drafts import own_drafts_of
from fdasync.runner.prompt_scores import scored_runs
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.host_runs import DraftedSteps, StepRuns, forwarded
from fdasync_transformers.model.recurrent.pieces import Take
from fdasync_transformers.mtp.drafter import MtpDrafter
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.parallel.in_step import share_step
from fdasync_transformers.sampling.sampler import compute_samples, plan_samples, sample
from fdasync_transformers.sampling.scoring import compute_scores, plan_scores, read_scores

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from fdasync.runner.base import PromptScores
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.mtp.drafter import Choose
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.sampling.sampler import SampleOutput
    from fdasync_transformers.sampling.scoring import ScorePlan

T = TypeVar("T")


class HostExecutor(Executor):
    """See the module and `Executor`."""

    def __init__(self, model: StepModel, bound: Bound) -> None:
        self._model = model
        self._bound = bound
        self._drafter = None if head_of(model.model) is None else MtpDrafter(model, _total_of(bound.collectives))
        self._drafts = DraftedSteps(bound.table, bound.speculation, bound.pipeline_depth, bound.vocab_size)
        self._compares = bound.collectives is not None and model.head.is_apart
        self._blocks = None if bound.host is None else BlockRows(bound.pool.blocks, bound.host, bound.part)
        states = model.states
        self._snapshots = None
        if states is not None and bound.snapshots is not None:
            self._snapshots = BlockRows(states.places, bound.snapshots, bound.snapshot_part)
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
        batch, own_drafts = self._drafts.plan(step), own_drafts_of(step, bound.speculation)
        leads = bound.collectives is None or not bound.collectives.rank
        if leads:
            bound.matchers.follow(step)
        for start in step.starts:
            column, offset = divmod(start.num_cached, bound.pool.block_tokens)
            if offset:
                # another instance computed the first tokens of this block, and the block was copied whole
                bound.pool.clear_past(start.blocks[column], offset)
        takes, later = self._begin_states(step, batch)
        runs = StepRuns(batch, bound.table)
        if not len(batch.positions):
            return self._taken(batch, runs, StepOutput(step.step_id, ()))
        if not leads:
            output = self._follow(batch, runs, own_drafts, takes)
            self._settle_states(batch, runs, later)
            return self._taken(batch, runs, output)
        part = forwarded(batch)
        plan = plan_scores(scored_runs(part, bound.table))
        lent = bound.lent.runs(part, bound.table)
        scores: tuple[PromptScores, ...] = ()
        with self._keeping(plan):
            logits = self._model.run(part, bound.table, bound.pool, runs.rows, takes, lent)
            hidden = self._compared()
            if plan is not None:
                scores = self._score(plan)
            output = self._sample(runs, logits)
            values = bound.aux.rows(batch.positions)
            if bound.collectives is not None:
                told = np.concatenate([runs.counts, np.array(output.tokens, np.int64)]).astype(np.int32)
                share_step(bound.collectives, step.step_id, values, hidden, told)
            if self._drafter is not None:
                # of tokens that all ranks know
                self._draft(self._drafter, part, runs, own_drafts)
        stood = runs.stood[batch.counts > 0]
        for run in lent:
            run.rows.stand(run.position, int(stood[run.number]))
        self._settle_states(batch, runs, later)
        output = self._taken(batch, runs, output)
        if bound.arena is not None:
            stands = runs.stands
            kept = values if stands.all() else {name: rows[stands] for name, rows in values.items()}
            bound.arena.scatter(batch.aux_index[stands], batch.generations[stands], kept)
        return msgspec.structs.replace(output, scores=scores) if scores else output

    def _begin_states(self, step: RunStep, batch: Batch) -> tuple[list[Take], list[Take]]:
        """Load the recurrent state of sequences that start behind cached tokens; returns the step's snapshots, and
        apart from them the snapshots of sequences with drafts: the samples decide if these are taken."""
        table, states = self._bound.table, self._model.states
        if states is not None:
            for start in step.starts:
                states.check_start(start.snapshot, start.num_cached)
                if start.snapshot >= 0:
                    states.begin(table.lane_of(start.key), start.snapshot)
        takes = [Take(table.lane_of(take.key), take.position, take.place) for take in step.snapshots]
        if not self._bound.speculation:
            return takes, []
        decodes = set(batch.lanes[: batch.num_decodes].tolist())
        return [one for one in takes if one.lane not in decodes], [one for one in takes if one.lane in decodes]

    def _settle_states(self, batch: Batch, runs: StepRuns, takes: list[Take]) -> None:
        """The states of sequences that decode go on behind the tokens that stand, where steps have drafts."""
        states = self._model.states
        if states is None or not self._bound.speculation:
            return
        count = batch.num_decodes
        of_lane: dict[int, list[Take]] = {}
        for take in takes:
            of_lane.setdefault(take.lane, []).append(take)
        columns = (batch.lanes[:count], batch.starts[:count], batch.counts[:count], runs.stood[:count])
        for lane, start, width, stood in zip(*(column.tolist() for column in columns), strict=True):
            for take in of_lane.get(lane, ()):
                behind = take.position - start
                if 0 < behind <= stood:
                    states.take_version(lane, behind if width > 1 else 0, take.place)
            if width > 1:
                states.settle(lane, stood)

    def _follow(self, batch: Batch, runs: StepRuns, own_drafts: int, takes: list[Take]) -> StepOutput:
        """As another rank than the first: KV and rows, without logits; rank 0 samples the tokens."""
        bound, collectives = self._bound, self._bound.collectives
        if collectives is None:
            raise InvariantBroken("a step of a group, and there is none")
        part = forwarded(batch)
        with self._keeping(None):
            self._model.run(part, bound.table, bound.pool, np.zeros(0, np.int64), takes)
            hidden = self._compared()
            values = bound.aux.rows(batch.positions)
            told = share_step(collectives, batch.step_id, values, hidden, np.zeros(0, np.int32))
            counts, tokens = np.split(told, [len(batch.sampled)])
            runs.follow(counts, tokens)
            if self._drafter is not None:
                self._draft(self._drafter, part, runs, own_drafts)
        return StepOutput(batch.step_id, tuple(tokens.tolist()))

    def _taken(self, batch: Batch, runs: StepRuns, output: StepOutput) -> StepOutput:
        """The next step goes on behind the positions that stand, where steps have drafts; the output says how many,
        and what the runner drafted of them."""
        if not self._bound.speculation:
            return output
        self._bound.table.take_runs(batch, runs.stood[: batch.num_decodes])
        own = None if self._drafter is None else self._drafts.own_drafts(batch)
        return msgspec.structs.replace(output, counts=tuple(runs.counts.tolist()), own_drafts=own)

    def _keeping(self, plan: ScorePlan | None) -> AbstractContextManager[None]:
        """Keep the hidden states of the pass inside where prompts are scored, ranks compare them, or a drafter takes
        them."""
        keeps = plan is not None or self._compares or self._drafter is not None
        return self._model.head.keeping() if keeps else nullcontext()

    def _compared(self) -> torch.Tensor | None:
        """The part of the pass that the ranks of a group compare."""
        return self._model.head.hidden if self._compares else None

    def _score(self, plan: ScorePlan) -> tuple[PromptScores, ...]:
        device = self._model.model.device
        sent = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
        results = compute_scores(lambda rows: self._bound.trim(self._model.head.logits(rows)), plan, sent)
        return read_scores(plan, {name: values.cpu().numpy() for name, values in results.items()})

    def _sample(self, runs: StepRuns, logits: torch.Tensor) -> StepOutput:
        """Sample, and write the tokens to where the next step reads them."""
        table = self._bound.table
        logits = self._bound.trim(logits)
        parts: list[SampleOutput] = []
        problems: list[tuple[int, str]] = []
        while (ahead := runs.ahead()) is not None:
            chosen, ends = ahead.lanes.tolist(), ahead.positions.tolist()
            specs = [spec for lane in chosen if (spec := table.samplers[lane]) is not None]
            histories = [table.tokens[lane, :end] for lane, end in zip(chosen, ends, strict=True)]
            matchers = self._bound.matchers.of(ahead.lanes)
            masks = None if matchers is None else matchers.masks()
            rows = logits if len(chosen) == len(logits) else logits[torch.from_numpy(ahead.rows).to(logits.device)]
            out = sample(rows, specs, ends, histories, masks)
            if matchers is not None:
                problems += matchers.accept(out.tokens)
            runs.take(np.array(out.tokens, np.int32))
            parts.append(out)
        output = runs.output(parts)
        return msgspec.structs.replace(output, problems=tuple(problems)) if problems else output

    def _draft(self, drafter: MtpDrafter, batch: Batch, runs: StepRuns, own_drafts: int) -> None:
        """Store the KV of the multi-token prediction layers, and draft for the next step where it may have drafts.

        `batch`: the part of the step that was forwarded; `own_drafts`: tokens behind each of its samples.
        """
        bound = self._bound
        stood = runs.stood
        stood = stood[stood > 0]
        most = np.zeros_like(stood)
        most[batch.sampled] = own_drafts
        hidden = self._model.head.hidden
        choose = partial(self._guess, batch, stood)
        if bound.collectives is not None:
            choose = partial(self._guess_alike, bound.collectives, choose)
        drafted = drafter.step(hidden, batch, stood, most, bound.table, bound.pool, choose)
        self._drafts.offer(batch, stood, drafted)

    @staticmethod
    def _guess_alike(
        collectives: Collectives,
        guess: Choose,
        logits: Callable[[], torch.Tensor],
        sequences: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Rank 0's guesses, on all ranks."""
        own = b"" if collectives.rank else guess(logits, sequences, positions).tobytes()
        return np.frombuffer(collectives.tell(own, "drafts")[0], np.int32)

    def _guess(
        self,
        batch: Batch,
        stood: NDArray[np.int64],
        logits: Callable[[], torch.Tensor],
        sequences: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """What would be sampled there, with that position's noise, if the model's logits were these. Drafts are no
        answers: whatever the logits are, this raises nothing, and grammars are left to what verifies."""
        table, lanes = self._bound.table, batch.lanes[sequences]
        specs = [
            msgspec.structs.replace(spec, raw=False, processed=False, top=0, grammar=b"")
            for lane in lanes.tolist()
            if (spec := table.samplers[lane]) is not None
        ]
        # penalties of the tokens that are known
        lengths = (batch.starts + stood)[sequences] + 1
        plan = plan_samples(specs, positions, lanes, lengths.tolist())
        sent = {name: torch.from_numpy(values) for name, values in plan.arrays.items()}
        results = compute_samples(self._bound.trim(logits()), plan, sent, torch.from_numpy(table.tokens))
        return results["tokens"].numpy().astype(np.int32)

    def _move(self, copy: SwapOut | SwapIn) -> CopyOutput:
        blocks, table, arena = self._blocks, self._bound.table, self._bound.arena
        if blocks is None:
            raise InvariantBroken("a copy, and there is no host tier")
        rows_before = arena.written_nbytes if arena is not None else 0
        if copy.snapshots:
            moved = self._move_snapshots(copy)
        elif isinstance(copy, SwapOut):
            moved = blocks.out(copy.device, copy.host)
        else:
            moved = blocks.back(copy.host, copy.device)
            table.place(copy.device, copy.slots, copy.generations)
        rows = arena.written_nbytes - rows_before if arena is not None else 0
        return CopyOutput(copy.copy_id, moved, rows)

    def _move_snapshots(self, copy: SwapOut | SwapIn) -> int:
        rows = self._snapshots
        if rows is None or copy.device:
            raise InvariantBroken(f"copy {copy.copy_id} has snapshots, and blocks too or no places on the host")
        if isinstance(copy, SwapOut):
            return rows.out(copy.snapshots, copy.snapshots_host)
        return rows.back(copy.snapshots_host, copy.snapshots)


def _total_of(collectives: Collectives | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return None if collectives is None else partial(collectives.all_reduce, label="what blocks carry")
