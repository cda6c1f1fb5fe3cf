"""The model's passes in the steps of a runner: how the tokens of a step attend, and which graph replays it, if any.

Where graphs are captured, a step that only decodes takes one by its number of rows (`graphs.py`), and a step with
prompts in it one by its number of tokens (`mixed_graphs.py`). Any other step is launched operation by operation. Knows
no samples and no futures. Made and called by `executor.py`.
"""

from __future__ import annotations

import bisect
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fdasync_transformers.execution.graphs import GraphLadder
from fdasync_transformers.execution.mixed_graphs import MixedLadder
from fdasync_transformers.execution.step_shape import Passed, device_batch

if TYPE_CHECKING:
    from collections.abc import Hashable
    from contextlib import AbstractContextManager
    from typing import Any

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.parts.step_part import Arrays, StepWork
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.execution.step_shape import Way
    from fdasync_transformers.model.kv import KVPool

# most bytes of keys and values that the tokens of chunks may read if each is computed as a decode: some 8 ms of an
# H200, where launching a step of 48 layers operation by operation takes ten times as long
_MOST_READ_NBYTES = 32 << 30
# longest context of a decode that is computed in tiles: one program reads all keys of a head, tile after tile
_MOST_TILED_TOKENS = 8192


class Passes:
    """See the module.

    Attributes:
        graphs, run_graphs: of decode steps, and of decode steps with drafts; None before `capture`.
        mixed: graphs of steps with prompts in them; None before `capture_mixed`.
        flat_tokens: a step of at most so many tokens is computed as if each were a decode, which a graph can replay.
    """

    def __init__(self, model: StepModel, lanes: DeviceLanes, pool: KVPool, memory: Any) -> None:
        """`memory`: of graphs."""
        self.graphs: GraphLadder | None = None
        self.run_graphs: GraphLadder | None = None
        self.mixed: MixedLadder | None = None
        self.flat_tokens = 0
        self._model = model
        self._lanes = lanes
        self._pool = pool
        self._memory = memory

    def capture(self, sizes: tuple[int, ...], lone: tuple[int, ...] | None) -> None:
        """Capture decode steps at these batch sizes, and check them; on the current stream. Blocks its loop.

        Args:
            lone: where steps may have drafts: sizes of the steps without, whose sequences have a row each.

        Raises RuntimeError where a graph cannot hold what the model does, or computes other logits.
        """
        if lone is not None:
            self.run_graphs = self._ladder(sizes, runs=True)
        self.graphs = self._ladder(lone or sizes, runs=False)
        # the tokens of one sequence follow each other through recurrent layers
        self.flat_tokens = 0 if self._model.recurrent is not None else sizes[-1]

    def _ladder(self, sizes: tuple[int, ...], *, runs: bool) -> GraphLadder:
        graphs = GraphLadder(self._model, self._lanes, self._pool, sizes, self._memory, runs=runs)
        if wrong := graphs.differing(self._model, self._lanes, self._pool):
            raise RuntimeError(f"the graph of {wrong} sequences does not answer as its operations do")
        return graphs

    def capture_mixed(self, sizes: tuple[int, ...], sequences: int, *, checks: bool) -> None:
        """Capture steps with prompts in them, of these numbers of tokens and at most `sequences` sequences, and check
        them where there are graphs. As `capture`."""
        mixed = MixedLadder(self._model, self._lanes, self._pool, sizes, sequences, self._memory)
        if checks and (wrong := mixed.differing()):
            raise RuntimeError(f"the graph of {wrong} tokens does not answer as its operations do")
        self.mixed = mixed

    def drop(self) -> None:
        """Let all graphs go."""
        self.graphs = self.run_graphs = self.mixed = None

    def plan(self, work: StepWork) -> Arrays:
        """Decide how the step's tokens attend; what is sent of its shape."""
        work.way = "both" if work.by_operations else self.way(work.batch)
        return self._model.arrays(work.batch, work.rows, work.way) if work.total else {}

    def way(self, batch: Batch) -> Way:
        """How the tokens of a step attend: in a way that a graph replays, where possible."""
        total, decodes = len(batch.positions), batch.num_decodes
        if total == decodes:
            return "decodes"
        read = (batch.positions[decodes:] + 1).sum() * self._model.layout.held_token_nbytes
        if total <= self.flat_tokens and int(read) <= _MOST_READ_NBYTES:
            return "decodes"
        mixed = self.mixed
        fits = mixed is not None and mixed.size_of(total, len(batch.lanes)) > 0
        short = not decodes or int(batch.positions[:decodes].max()) < _MOST_TILED_TOKENS
        return "tiles" if fits and short else "both"

    def keeping(self, work: StepWork) -> AbstractContextManager[None]:
        """Within it the hidden states of the step's pass stay, where a part reads them."""
        return self._model.head.keeping() if work.keeps_hidden else nullcontext()

    def compute(self, work: StepWork) -> Passed:
        """Queue the step's pass on the current stream."""
        drafted = work.drafted
        # a sequence has several rows that decode
        runs = drafted is not None and bool((drafted.widths > 1).any())
        passed = self._replayed(work, runs=runs)
        if passed is None:
            shape = device_batch(
                work.batch, work.sent, work.way, runs=runs, spans=work.spans, takes=work.takes, tell=work.tell
            )
            passed = self._model.forward(shape, self._lanes, self._pool)
        return passed

    def _replayed(self, work: StepWork, *, runs: bool) -> Passed | None:
        """The pass by a graph; None: none has it."""
        sent = work.sent
        if work.way == "tiles" and self.mixed is not None:
            return self.mixed.replay(sent, work.total, work.state_plan)
        passed = None
        if work.way == "decodes":
            for ladder in (None if runs else self.graphs, self.run_graphs):
                if passed is None and ladder is not None:
                    passed = ladder.replay(sent["lanes"], sent["starts"], work.state_plan)
        if passed is not None and "rows" in sent:
            passed = Passed(passed.logits.index_select(0, sent["rows"]), passed.states)
        return passed

    @staticmethod
    def kind(work: StepWork) -> Hashable:
        """Steps of one kind take alike."""
        if work.keeps_hidden:
            return ("scored", work.total // 256)
        return ("decode", work.total) if work.way == "decodes" else ("mixed", work.total // 256)


def lone_sizes(sizes: tuple[int, ...], running: int) -> tuple[int, ...]:
    """The sizes that steps need which decode up to so many sequences, one row each."""
    return sizes[: bisect.bisect_left(sizes, running) + 1]
