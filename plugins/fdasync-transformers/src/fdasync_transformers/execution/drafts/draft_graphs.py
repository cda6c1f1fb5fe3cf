"""CUDA graphs of the passes that draft, at a short ladder of numbers of sequences: one for each depth.

A pass computes from the device's own tables and from the states of the pass before, which stay where its graph left
them; so only the lanes are sent for a step. Captured once, before the first step. Knows no sampling. Made by
`own_drafts.py`.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync_transformers.execution.graphs import MOST_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_transformers.execution.device_lanes import DeviceLanes

    Pass = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    states: torch.Tensor


class DraftGraphs:
    """Graphs of one model over one pool.

    Attributes:
        sizes: numbers of sequences captured, rising.
    """

    def __init__(self, run: Pass, sizes: tuple[int, ...], depths: int, lanes: DeviceLanes, memory: Any) -> None:
        """Capture on the current stream, which must not be the default one. Waits for the device; blocks its loop.

        Args:
            run: queues the pass of a depth for lanes (int32 [D]), from what the pass before returned.
            depths: how many there are.
            lanes: the tables that `run` reads.
            memory: a handle of torch's pools, of graphs that never run beside these.

        Raises RuntimeError where a graph cannot hold what the model does.
        """
        self.sizes = sizes
        self._tables = lanes
        device = lanes.tokens.device
        self._lanes = torch.full((sizes[-1],), -1, dtype=torch.int32, device=device)
        # one place for the logits of all passes: each is sampled before the next one
        self._logits: torch.Tensor | None = None
        self._captured: dict[int, list[_Captured]] = {}
        # the largest first: the smaller ones then fit into its memory
        for size in reversed(sizes):
            self._captured[size] = []
            before: torch.Tensor | None = None
            for depth in range(depths):
                # compile kernels and have libraries take their workspaces before the capture
                _, logits = run(depth, self._lanes[:size], before)
                if self._logits is None and logits is not None:
                    self._logits = torch.empty_like(logits)
                del logits
                torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream(device)):
                    before, made = run(depth, self._lanes[:size], before)
                    if self._logits is not None and made is not None:
                        self._logits[:size].copy_(made)
                    del made
                self._captured[size].append(_Captured(graph, before))
        torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own

    def replay(self, depth: int, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Queue the pass of a depth, after the pass of the depth before: its states and logits [D, V], valid until the
        next replay of any graph in the same memory. None where there are more sequences than the largest size."""
        count = len(lanes)
        place = bisect.bisect_left(self.sizes, count)
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        if not depth:
            self._lanes[:count].copy_(lanes, non_blocking=True)
            self._lanes[count:size].fill_(-1)
        captured = self._captured[size][depth]
        captured.graph.replay()
        return captured.states, None if self._logits is None else self._logits[:count]

    def differing(self, run: Pass) -> int:
        """A number of sequences whose graph computes other logits than the same pass launched operation by operation;
        0: none. Drafts behind the second token of lane 0, for start-up. Waits for the device.

        All ranks of a group make all passes; ranks that compute no logits find nothing."""
        tables = self._tables
        wrong = 0
        tables.lengths[0], tables.drafted[0] = 1, len(self._captured[self.sizes[0]])
        try:
            for size, graphs in self._captured.items():
                before: torch.Tensor | None = None
                self._lanes.fill_(-1)
                self._lanes[0] = 0
                for depth in range(len(graphs)):
                    before, wanted = run(depth, self._lanes[:size], before)
                    graphs[depth].graph.replay()
                    if self._logits is None or wanted is None:
                        continue
                    first = wanted[:1].float()
                    error = (self._logits[:1].float() - first).norm() / (first - first.mean()).norm()
                    # blocking: start-up, in a process of its own
                    if not float(error) < MOST_ERROR:
                        wrong = size
            return wrong
        finally:
            tables.lengths[0] = tables.drafted[0] = 0
