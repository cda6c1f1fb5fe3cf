"""Runs of tokens on the CPU: the drafts that a step forwards, and which of its positions stand once they are sampled.

A draft is written to its position in the table of tokens, so the model's pass reads it like any other token. Samples
come in rounds: the first of each sequence, then the second of each sequence whose first draft was sampled, and so on.
So penalties, grammars and noise see accepted tokens alone, and nothing is sampled behind a rejected draft. Knows lanes
and tokens; knows no model and no logits. Called by `host_executor.py`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.runner.base import StepOutput
from fdasync.runner.drafts import Path, follow, read_paths
from fdasync.runner.input_batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.mtp.drafter import Drafted
    from fdasync_transformers.sampling.sampler import SampleOutput

    Ints = NDArray[np.int64]


class DraftedSteps:
    """Plans steps with drafts: the host's, or the runner's own drafter's for sequences without a path of the host.

    Args:
        table: made for runs of `speculation` + 1 tokens.
        speculation: most drafts of a sequence in a step; 0: steps have none.
        depth: most steps in flight.
        vocab_size: drafts that are no ids below it end a path.
    """

    def __init__(self, table: InputBatch, speculation: int, depth: int, vocab_size: int) -> None:
        self._table = table
        self._speculation = speculation
        self._depth = depth
        self._vocab_size = vocab_size
        # of the runner's drafter, by sequence
        self._own: dict[int, Path] = {}
        # how many drafts the last planned step forwards, by lane
        self._forwarded: dict[int, int] = {}

    def plan(self, step: RunStep) -> Batch:
        """As `InputBatch.plan`; drafts stand in the table of tokens then. Raises InvariantBroken, also for drafts that
        do not fit the step or the limits."""
        if not self._speculation:
            if step.drafts is not None:
                raise InvariantBroken(f"step {step.step_id} has drafts, and this runner verifies none")
            return self._table.plan(step)
        for key in step.leaves:
            self._own.pop(key, None)
        paths = {} if step.drafts is None else read_paths(step.drafts, self._speculation, self._depth)
        return self._table.plan(step, lambda decodes: self._lay(step.step_id, paths, decodes))

    def _lay(self, step_id: int, paths: dict[int, Path], decodes: Ints) -> Ints:
        """Write the drafts behind the last token of each decode; returns how many positions each wants."""
        table = self._table
        keys = [table.keys[lane] for lane in decodes.tolist()]
        if left := set(paths).difference(keys):
            raise InvariantBroken(f"step {step_id} has drafts for {sorted(left)}, which it does not decode")
        wanted = np.ones(len(keys), np.int64)
        self._forwarded = {}
        for number, (key, lane) in enumerate(zip(keys, decodes.tolist(), strict=True)):
            path = paths.get(key) or self._own.get(key)
            if path is None:
                continue
            known, last = table.tokens[lane], int(table.length[lane])
            # positions past the table have no room anyway
            drafts = follow(path, last, self._vocab_size)[: max(len(known) - last - 1, 0)]
            known[last + 1 : last + 1 + len(drafts)] = drafts
            wanted[number] += len(drafts)
            if key not in paths:
                self._forwarded[lane] = len(drafts)
        return wanted

    def own_drafts(self, batch: Batch) -> tuple[int, ...]:
        """How many of the runner's drafts the step forwarded of each sampled sequence. `batch`: of the last plan."""
        widths = batch.counts.tolist()
        lanes = batch.lanes.tolist()
        # a step without room for all drafts forwards the first ones
        return tuple(
            [
                min(self._forwarded.get(lanes[place], 0), max(widths[place] - 1, 0)) if place < batch.num_decodes else 0
                for place in batch.sampled.tolist()
            ]
        )

    def offer(self, batch: Batch, stood: Ints, drafted: Drafted) -> None:
        """The runner's drafter drafted this behind the tokens of a step, for the next step of each sequence.

        `stood`: as `StepRuns.stood`, of the same sequences.
        """
        ends = (batch.starts + stood).tolist()
        for lane, end, count, tokens in zip(
            batch.lanes.tolist(), ends, drafted.counts.tolist(), drafted.tokens, strict=True
        ):
            key = self._table.keys[lane]
            # the token at `end` is sampled
            if count:
                self._own[key] = Path(end + 1, count, tokens[:count])
            else:
                # of what was drafted before, some may lie behind
                self._own.pop(key, None)


class Round(NamedTuple):
    """What is sampled next: lanes, positions of the samples and rows of the logits of n sequences, int64 [n]."""

    lanes: Ints
    positions: Ints
    rows: Ints


class StepRuns:
    """The runs of one step, as its samples come.

    Attributes:
        rows: int64 [R], rows of the step whose logits are needed: all of decodes, the last of a prompt's last chunk.
        counts: int64 [N], tokens of each sampled sequence so far.
    """

    def __init__(self, batch: Batch, table: InputBatch) -> None:
        self._batch = batch
        self._table = table
        chosen = batch.sampled
        self._decodes = chosen < batch.num_decodes
        self._widths = np.where(self._decodes, batch.counts[chosen], 1)
        self._firsts = np.where(self._decodes, 0, batch.counts[chosen] - 1)
        self._places = np.cumsum(self._widths) - self._widths
        first_rows = (np.cumsum(batch.counts) - batch.counts)[chosen] + self._firsts
        self.rows = np.repeat(first_rows - self._places, self._widths) + np.arange(int(self._widths.sum()))
        self.counts = np.zeros(len(chosen), np.int64)
        self._going = np.flatnonzero(self._widths)
        self._sampled: list[Ints] = []

    def ahead(self) -> Round | None:
        """The next round; None: all runs have ended."""
        going, batch = self._going, self._batch
        if not len(going):
            return None
        chosen = batch.sampled[going]
        positions = batch.starts[chosen] + self._firsts[going] + self.counts[going] + 1
        return Round(batch.lanes[chosen], positions, self._places[going] + self.counts[going])

    def take(self, tokens: NDArray[np.int32]) -> None:
        """These were sampled in the round: writes them to the table, and ends the runs whose next draft is another."""
        going, ahead, known = self._going, self.ahead(), self._table.tokens
        if ahead is None:
            raise InvariantBroken("samples behind the end of all runs of a step")
        # a sequence at the end of its context samples a token that no step will read
        kept = ahead.positions < known.shape[1]
        lanes, positions = ahead.lanes[kept], ahead.positions[kept]
        agrees = np.zeros(len(going), bool)
        agrees[kept] = known[lanes, positions] == tokens[kept]
        known[lanes, positions] = tokens[kept]
        self.counts[going] += 1
        self._sampled.append(going)
        self._going = going[agrees & (self.counts[going] < self._widths[going])]

    def follow(self, counts: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Take all rounds as another rank sampled them: tokens in the order of `output`, so many of each sequence.

        Raises InvariantBroken where they are not runs of this step.
        """
        places = np.cumsum(counts) - counts
        while len(going := self._going):
            at = places[going] + self.counts[going]
            if int(at.max()) >= len(tokens):
                raise InvariantBroken(f"{len(tokens)} tokens of another rank, and the runs of this one go on")
            self.take(tokens[at])
        if not np.array_equal(self.counts, counts):
            raise InvariantBroken(
                f"runs of {counts.tolist()} tokens on another rank, {self.counts.tolist()} on this one"
            )

    @property
    def stood(self) -> Ints:
        """int64 [S], how many positions of each sequence of the step stand: the first ones."""
        stood = self._batch.counts.copy()
        stood[self._batch.sampled[self._decodes]] = self.counts[self._decodes]
        return stood

    @property
    def stands(self) -> NDArray[np.bool_]:
        """bool [T], which positions of the step stand."""
        counts = self._batch.counts
        nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        kept: NDArray[np.bool_] = nth < np.repeat(self.stood, counts)
        return kept

    def output(self, parts: Sequence[SampleOutput]) -> StepOutput:
        """The step's output, of the samples of each round; without counts."""
        if len(parts) == 1:
            return parts[0].step_output(self._batch.step_id)
        # a sequence's entries side by side, in the order of the rounds
        order = np.argsort(np.concatenate([np.zeros(0, np.int64), *self._sampled]), kind="stable").tolist()

        def column(name: str, default: Any) -> tuple[Any, ...] | None:
            columns = [getattr(part, name) for part in parts]
            if all(values is None for values in columns):
                return None
            filled = [[default] * len(part.tokens) if x is None else x for part, x in zip(parts, columns, strict=True)]
            entries = list(chain.from_iterable(filled))
            return tuple([entries[place] for place in order])

        return StepOutput(
            step_id=self._batch.step_id,
            tokens=column("tokens", 0) or (),
            raw=column("raw", 0.0),
            processed=column("processed", 0.0),
            top=column("top", None),
        )


def forwarded(batch: Batch) -> Batch:
    """The part of a step that the model sees: without sequences whose block tables have no room, and so no position."""
    live = batch.counts > 0
    if live.all():
        return batch
    part = Batch(batch.step_id, batch.lanes[live], batch.counts[live], int(live[: batch.num_decodes].sum()))
    part.starts = batch.starts[live]
    part.positions, part.kv_index = batch.positions, batch.kv_index
    part.aux_index, part.generations = batch.aux_index, batch.generations
    part.sampled = (np.cumsum(live) - 1)[batch.sampled[live[batch.sampled]]]
    return part
