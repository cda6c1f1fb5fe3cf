"""CUDA graphs of decode steps at a short ladder of batch sizes: a step costs the host one launch.

Each graph computes from the device's own tables, so only lanes and positions are sent for a step. A step of n sequences
runs at the next size of the ladder; rows past n are padding, whose KV is not stored. Captured once, before the first
step; weights are updated in place, so graphs stay valid. Knows no sampling. Made by `passes.py`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.execution.states.plan_buffer import PlanBuffer
from fdasync_transformers.execution.step_shape import DeviceBatch, Passed

if TYPE_CHECKING:
    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.model.kv import KVPool


#: most error of one token's logits, over their spread, between a graph and the same operations launched one by one
MOST_ERROR = 0.05


def ladder(most_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture: every power of two, half-way points from 16 on, and `most_rows` itself."""
    sizes = {1, most_rows}
    power = 2
    while power < most_rows:
        sizes.add(power)
        if power >= 16 and power * 3 // 2 < most_rows:
            sizes.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(sizes))


def decode_rows(limits: RunnerLimits) -> int:
    """Most rows of a step that decodes: the last token of each sequence, and its drafts."""
    return max(limits.max_running, min(limits.max_running * (1 + limits.speculation), limits.max_step_tokens))


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    passed: Passed


class GraphLadder:
    """Graphs of one model over one pool.

    Attributes:
        sizes: batch sizes captured, rising.
    """

    def __init__(
        self,
        model: StepModel,
        lanes: DeviceLanes,
        pool: KVPool,
        sizes: tuple[int, ...],
        memory: Any,
        *,
        runs: bool = False,
    ) -> None:
        """Capture on the current stream, which must not be the default one. Waits for the device; blocks its loop.

        `memory` is a handle of torch's pools, of graphs that never run beside these; `runs`: rows of a sequence may
        stand side by side, and are computed in tiles.

        Raises RuntimeError where a graph cannot hold what the model does.
        """
        self.sizes = sizes
        device = model.model.device
        most = sizes[-1]
        self._lanes = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._starts = torch.zeros(most, dtype=torch.int64, device=device)
        # graphs read these three at their addresses for as long as they live
        self._first_rows = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._runs = runs
        self._plan = PlanBuffer.of(model, most if runs else 0)
        self._captured: dict[int, _Captured] = {}
        # the largest first: the smaller ones then fit into its memory
        for size in reversed(sizes):
            batch = self._batch(size)
            # compile kernels and have libraries take their workspaces before the capture
            model.forward(batch, lanes, pool)
            torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream(device)):
                passed = model.forward(batch, lanes, pool)
            self._captured[size] = _Captured(graph, passed)
        torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own

    def differing(self, model: StepModel, lanes: DeviceLanes, pool: KVPool) -> int:
        """A batch size whose graph computes other logits than the same step launched operation by operation; 0: none.

        Computes one token at the beginning of lane 0, for start-up. The other step has the graph's padding too: in
        another shape sums have another order, and a near tie in a router may fall the other way. Waits for the device.
        """
        device = model.model.device
        lane = torch.zeros(1, dtype=torch.int32, device=device)
        start = torch.zeros(1, dtype=torch.int64, device=device)
        for size, captured in self._captured.items():
            self._set(lane, start, size)
            if self._plan is not None:
                self._plan.set_first(1)
            batch = self._batch(size)
            wanted = model.forward(batch, lanes, pool).logits[:1].float()
            captured.graph.replay()
            error = (captured.passed.logits[:1].float() - wanted).norm() / (wanted - wanted.mean()).norm()
            # blocking: start-up, in a process of its own
            if not float(error) < MOST_ERROR:
                return size
        return 0

    def replay(
        self,
        lanes: torch.Tensor,
        starts: torch.Tensor,
        plan: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> Passed | None:
        """Queue a decode step of these rows (int32 and int64 [n]) with the plan of their sequences' recurrent states;
        its tensors are valid until the next replay of any graph in the same memory, and its states have padding behind.
        None where there are more rows than the largest size."""
        count = len(lanes)
        place = bisect.bisect_left(self.sizes, count)
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        self._set(lanes, starts, size)
        if self._plan is not None and plan is not None:
            self._plan.set(*plan)
        captured = self._captured[size]
        captured.graph.replay()
        return Passed(captured.passed.logits[:count], captured.passed.states)

    def _batch(self, size: int) -> DeviceBatch:
        lanes, starts, first_rows = self._lanes[:size], self._starts[:size], self._first_rows[: size + 1]
        spans = None if self._plan is None else self._plan.spans(size, size if self._runs else 0)
        return DeviceBatch(size, size, lanes, starts, first_rows, runs=self._runs, spans=spans)

    def _set(self, lanes: torch.Tensor, starts: torch.Tensor, size: int) -> None:
        """Queue the inputs of the next replay of this size: these sequences, and padding behind them."""
        count = len(lanes)
        self._lanes[:count].copy_(lanes, non_blocking=True)
        self._lanes[count:size].fill_(-1)
        self._starts[:count].copy_(starts, non_blocking=True)
