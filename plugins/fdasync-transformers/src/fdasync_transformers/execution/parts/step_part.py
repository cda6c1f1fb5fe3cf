"""A step is made of parts. Each brings one feature of a step: samples, scores of prompts, grammars, rows of aux data,
drafts, recurrent states, what ranks tell each other.

`executor.py` plays each step in five turns, and asks all parts in each of them:

1. plan: on the host; the arrays that ride on the step's one copy to the device.
2. before: in front of the model's pass.
3. passed: right behind the pass, while what it has left inside the model is still there.
4. after: once the part is ready. Behind `samples` and `ranks` a part finds the samples here, as tensors.
5. read: the device is done, and results are on the host. In the reverse order of parts.

In turns 2 to 4 a part queues work on the current stream, and waits for nothing. What it returns there goes to the host:
tensors of its own, of a dtype that numpy has. Logits of a pass are the graph's that replayed it, and drafts of the
model's own layers replay graphs of the same memory: a part that reads logits stands in front of them, and returns no
view of them.

A part keeps what it has of a step in its `PartWork`; one that has nothing to do in a step makes none. What parts tell
each other of a step is written in `StepWork`, and nowhere else. A new part is a module beside this one and a line in
`make.py`, which gives it the runner's memory (`executor.Bound`) and says on which ranks of a group it is. A number of
each token that requests shall get is better an aux datum (docs/write-a-runner.md): it then follows the token's block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from fdasync_kernels.recurrence.spans import Spans
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.gpu.completion import Hold
    from fdasync.runner.base import StepOutput
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.drafts.step_rows import Settled, StepRows
    from fdasync_transformers.execution.step_shape import Passed, Way
    from fdasync_transformers.model.recurrent.pieces import Take

T = TypeVar("T")
#: what a part plans of a step
P = TypeVar("P")
Arrays = dict[str, "NDArray[np.generic]"]
Tensors = dict[str, "torch.Tensor"]


class Placed(NamedTuple):
    """Where the decodes of a queued step are, int32 [n] on the device.

    Attributes:
        starts: position of the first row of each.
        used: how many of its rows are no padding.
    """

    starts: torch.Tensor
    used: torch.Tensor


class Accepted(NamedTuple):
    """What stands of the samples of a queued step with drafts.

    Attributes:
        runs: int64 [N, columns] of its sequences, as `RUN_COLUMNS`, on the device.
        decodes: how many of them decode, the first ones.
        told: `starts`, `counts` and `used` of `DeviceDrafts`, on the device.
    """

    runs: torch.Tensor
    decodes: int
    told: Tensors


@dataclass(slots=True, eq=False)
class StepWork:
    """A step on its way, and what its parts tell each other. An attribute is read by later parts of the turn in which
    one writes it, and in later turns.

    Attributes:
        step, batch: as the scheduler asks for it, and as it is planned.
        rows: int64 [R], rows of the step whose logits are sampled from. With drafts some are padding, or samples that
            do not stand; `settled` tells.
        drafted: where steps may have drafts: how the rows of `batch` were planned.
        by_operations: no graph may replay it.
        keeps_hidden: `Head.hidden` has the hidden states of the pass in `passed`; with `by_operations` alone.
        way: how its tokens attend.
        sent: the arrays of the passes (`batch_arrays`), on the device.
        noise: float64 [J, 4] on the device, numbers of the samples' jobs; the second is the noise, which drafts set.
        placed: where the decodes are; None: it has no drafts, or samples nothing.
        spans: the plan of recurrent states for the pass; `state_plan` likewise for graphs.
        takes: snapshots of recurrent states that the pass takes, where no kernel computes them.
        tell: is called with what each indexer picks in the pass; None: no sequence asks for that.
        passed: what the pass computed; its logits are of `rows`, and wider than the vocabulary (`Bound.trim`). None:
            there is no pass.
        staged: rows of aux data on the device, by the name of their spec.
        processed: logits that samples are drawn from in place of the pass's, on the device, and int64 [n], which rows
            of them are others; None: no row is.
        masks: of grammars, on the device.
        tokens: int64 or int32 [R] on the device, the samples; None: there are none.
        sampled: the samples on the host, those that do not stand included.
        accepted: what stands of them, on the device.
        settled: likewise, on the host; None: all do.
        holds: buffers that the queued work uses.
        parts: of those that take part, in their order.
    """

    step: RunStep
    batch: Batch
    drafted: StepRows | None = None
    rows: NDArray[np.int64] = field(init=False)
    by_operations: bool = False
    keeps_hidden: bool = False
    way: Way = "both"
    sent: Tensors = field(default_factory=dict)
    noise: torch.Tensor | None = None
    placed: Placed | None = None
    spans: Spans | None = None
    state_plan: tuple[torch.Tensor, torch.Tensor | None] | None = None
    takes: tuple[Take, ...] = ()
    tell: Callable[[int, torch.Tensor], None] | None = None
    passed: Passed | None = None
    staged: Tensors = field(default_factory=dict)
    processed: tuple[torch.Tensor, torch.Tensor] | None = None
    masks: Tensors = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    sampled: Sequence[int] = ()
    accepted: Accepted | None = None
    settled: Settled | None = None
    holds: list[Hold] = field(default_factory=list)
    parts: list[PartWork[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lasts = np.cumsum(self.batch.counts) - 1
        self.rows = lasts[self.batch.sampled] if self.total else np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        """How many tokens it has."""
        return len(self.batch.positions)

    @property
    def is_ready(self) -> bool:
        """Whether all that follows the pass can be queued now."""
        return all(own.part.is_ready(own.plan) for own in self.parts)


@dataclass(slots=True, eq=False)
class PartWork(Generic[P]):
    """What a part has of one step.

    Attributes:
        plan: the part's own.
        arrays: what is sent to the device with the step.
        sent: `arrays` on the device.
        results: what `passed` and `after` have returned; kept until the device is done with it.
    """

    part: StepPart[P]
    plan: P
    arrays: Arrays = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)
    results: Tensors = field(default_factory=dict)


class StepPart(ABC, Generic[P]):
    """A part of a runner's steps; every method but `plan` may be left out. Used from the runner's loop.

    Attributes:
        name: of the part, and of its arrays and results; no other part has it.
    """

    name: str

    @abstractmethod
    def plan(self, work: StepWork) -> PartWork[P] | None:
        """Plan a step; called for each step in the order of launch. None: the part has nothing to do in it.

        Raises InvariantBroken for steps that cannot be.
        """

    def is_ready(self, plan: P) -> bool:
        """Whether `after` can be called. False: only once the step before this one has ended, which makes it true."""
        return True

    def before(self, work: StepWork, own: PartWork[P]) -> None:
        """Queue work in front of the pass, on the current stream."""

    def passed(self, work: StepWork, own: PartWork[P]) -> Tensors:
        """Queue work behind the pass; tensors that go to the host. Called where there is a pass."""
        return {}

    def after(self, work: StepWork, own: PartWork[P]) -> Tensors:
        """Queue work behind that of `passed`; tensors that go to the host."""
        return {}

    def read(self, work: StepWork, own: PartWork[P], fetched: Mapping[str, Any], output: StepOutput) -> StepOutput:
        """The step has ended. `fetched`: the tensors of `passed` and `after` on the host, valid for this call.

        Raises RunnerError where they cannot be.
        """
        return output

    def warm(self) -> None:
        """Queue its kernels once at the start, so that no step waits while they are compiled; changes nothing."""

    def capture(self, sizes: tuple[int, ...]) -> None:
        """Capture graphs of what it queues, for steps of so many sequences; on the current stream. Block 0 of the pool
        may be written. Raises RuntimeError where a graph cannot hold it, or computes something else."""


class RowsPart(StepPart[P]):
    """The part that lays out the rows of a step, and says which of its samples stand: with drafts, or without."""

    name = "rows"

    @abstractmethod
    def begin(self, step: RunStep) -> StepWork:
        """The step with its batch; the table of lanes has taken the step. Raises InvariantBroken."""


def of_prefix(arrays: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The arrays whose names begin so, by their names without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
