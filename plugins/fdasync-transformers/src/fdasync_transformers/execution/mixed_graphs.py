"""CUDA graphs of steps with prompts in them, at a few numbers of tokens: a step costs the host a few launches.

The captured kernels read the numbers that differ from step to step (lanes, lengths, tiles, rows whose logits are
wanted) from padded buffers of a fixed size. A padding sequence has no tokens, a padding tile belongs to a padding
sequence, a padding row belongs to no sequence and its KV is not stored. Every sequence is computed in tiles, decodes
too. Knows no sampling. Made by `passes.py`; decode steps are in `graphs.py`.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.attention.prefill import PREFILL_TILE

from fdasync_transformers.execution.graphs import MOST_ERROR
from fdasync_transformers.execution.states.plan_buffer import PlanBuffer
from fdasync_transformers.execution.step_shape import DeviceBatch, Passed

if TYPE_CHECKING:
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.model.kv import KVPool

# a step of few tokens, such as what is left of a prompt behind a prefix hit, is not padded to many
_FEW = (16, 32, 64, 128, 256)
# launching 48 layers operation by operation takes a host some 110 ms, in which one GPU computes 8,192 tokens of a model
# of 3 billion active weights, and two ranks twice as many. From 2,048 tokens on sizes are further apart
_STEP, _NARROW_UNTIL = 256, 2048
_WIDE_STEP, _MOST_TOKENS = 1024, 8192


def token_ladder(max_step_tokens: int, flat_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture: powers of two from 16, multiples of 256 up to 2,048, and multiples of 1,024 up to
    8,192 or to the most of a step.

    A step of at most `flat_tokens` has another graph: each of its tokens is computed as a decode.
    """
    most = min(max_step_tokens, _MOST_TOKENS)
    narrow, wide = range(2 * _STEP, _NARROW_UNTIL + 1, _STEP), range(_NARROW_UNTIL, most + 1, _WIDE_STEP)
    sizes = [size for size in (*_FEW, *narrow, *wide[1:]) if flat_tokens < size <= most]
    if most > flat_tokens and (not sizes or sizes[-1] < most):
        sizes.append(most)
    return tuple(sizes)


class MixedLadder:
    """Graphs of one model over one pool; on a CPU, for tests, the same steps without graphs.

    Attributes:
        sizes: tokens of the steps captured, rising.
        sequences: most sequences of a step.
    """

    def __init__(
        self,
        model: StepModel,
        lanes: DeviceLanes,
        pool: KVPool,
        sizes: tuple[int, ...],
        sequences: int,
        memory: Any,
    ) -> None:
        """Capture on the current stream, which must not be the default one. Waits for the device; blocks its loop.

        `memory` is a handle of torch's pools, of graphs that never run beside these.

        Raises RuntimeError where a graph cannot hold what the model does.
        """
        self.sizes = sizes
        self.sequences = sequences
        self._model, self._tables, self._pool = model, lanes, pool
        device = model.model.device
        # the last place is the sequence of padding tiles
        places = sequences + 1
        self._lanes = torch.full((places,), -1, dtype=torch.int32, device=device)
        self._starts = torch.zeros(places, dtype=torch.int64, device=device)
        self._first_rows = torch.zeros(places + 1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(places, dtype=torch.int32, device=device)
        self._tiles = torch.zeros((places + sizes[-1] // PREFILL_TILE, 2), dtype=torch.int32, device=device)
        self._rows = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._plan = PlanBuffer.of(model, sizes[-1])
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Passed]] = {}
        self._pad(0, 0, 0, 0)
        if device.type == "cuda":
            self._capture(device, memory)

    def _capture(self, device: torch.device, memory: Any) -> None:
        # the largest first: the smaller ones then fit into its memory
        for size in reversed(self.sizes):
            # compile kernels and have libraries take their workspaces before the capture
            self._forward(size)
            torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream(device)):
                passed = self._forward(size)
            self._captured[size] = graph, passed
        torch.cuda.synchronize(device)  # blocking: start-up, in a process of its own

    def _forward(self, size: int) -> Passed:
        tiles = self._tiles[: self.sequences + 1 + size // PREFILL_TILE]
        spans = None if self._plan is None else self._plan.spans(self.sequences, size)
        batch = DeviceBatch(
            size, 0, self._lanes, self._starts, self._first_rows, self._counts, tiles, self._rows, padded=True,
            spans=spans,
        )  # fmt: skip
        return self._model.forward(batch, self._tables, self._pool)

    def size_of(self, tokens: int, sequences: int) -> int:
        """The captured size for a step of so many tokens and sequences; 0: none."""
        place = bisect.bisect_left(self.sizes, tokens)
        return self.sizes[place] if place < len(self.sizes) and sequences <= self.sequences else 0

    def replay(
        self,
        sent: dict[str, torch.Tensor],
        tokens: int,
        plan: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> Passed:
        """Queue a step of so many tokens, for which `size_of` found a size; returns logits of its `rows`. Its tensors
        are valid until the next replay of any graph in the same memory, and its states have padding behind.

        `sent` has the arrays of `batch_arrays` for tiles, `plan` those of `plan_states`, on the device.
        """
        rows = sent["rows"]
        pairs = (
            (self._lanes, sent["lanes"]),
            (self._starts, sent["starts"]),
            (self._first_rows, sent["first_rows"]),
            (self._counts, sent["counts"]),
            (self._tiles, sent["tiles"]),
            (self._rows, rows),
        )
        for kept, given in pairs:
            kept[: len(given)].copy_(given, non_blocking=True)
        if self._plan is not None and plan is not None:
            self._plan.set(*plan)
        self._pad(len(sent["lanes"]), tokens, len(sent["tiles"]), len(rows))
        size = self.size_of(tokens, len(sent["lanes"]))
        if self._captured:
            graph, passed = self._captured[size]
            graph.replay()
        else:
            passed = self._forward(size)
        return Passed(passed.logits[: len(rows)], passed.states)

    def _pad(self, sequences: int, tokens: int, tiles: int, rows: int) -> None:
        """Queue the padding of the buffers behind so many entries in use."""
        self._lanes[sequences:].fill_(-1)
        self._first_rows[sequences:].fill_(tokens)
        self._counts[sequences:].zero_()
        self._tiles[tiles:, 0].fill_(self.sequences)
        self._tiles[tiles:, 1].zero_()
        self._rows[rows:].zero_()

    def differing(self) -> int:
        """A size whose graph computes other logits than the same step launched operation by operation; 0: none.

        Computes two tokens at the beginning of lane 0, for start-up; see `GraphLadder.differing`. Waits for the device.
        """
        device = self._model.model.device
        lane = torch.zeros(1, dtype=torch.int32, device=device)
        start = torch.zeros(1, dtype=torch.int64, device=device)
        first_rows = torch.tensor([0, 2], dtype=torch.int32, device=device)
        counts = torch.full((1,), 2, dtype=torch.int32, device=device)
        tiles = torch.zeros((1, 2), dtype=torch.int32, device=device)
        rows = torch.ones(1, dtype=torch.int64, device=device)
        sent = {
            "lanes": lane,
            "starts": start,
            "first_rows": first_rows,
            "counts": counts,
            "tiles": tiles,
            "rows": rows,
        }
        if self._plan is not None:
            self._plan.set_first(2)
        for size in self.sizes:
            # sets the buffers; it replays the smallest size, as for any two tokens
            self.replay(sent, 2)
            wanted = self._forward(size).logits[:1].float()
            graph, passed = self._captured[size]
            graph.replay()
            error = (passed.logits[:1].float() - wanted).norm() / (wanted - wanted.mean()).norm()
            # blocking: start-up, in a process of its own
            if not float(error) < MOST_ERROR:
                return size
        return 0
