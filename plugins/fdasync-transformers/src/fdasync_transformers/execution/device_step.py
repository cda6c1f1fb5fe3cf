"""The steps of a model by kernels, on a GPU (or, for tests, on a CPU in Triton's interpreter).

The model and the library's code are the same as in `step.py`. Here the device computes positions, slots and token ids,
attention is `TritonPaging`, and nothing waits. CUDA graphs can replay the steps (`graphs.py`, `mixed_graphs.py`). Knows
the model and the pool; knows nothing of sampling, arenas or futures. Called as `StepModel` is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from fdasync_kernels.attention.decode_rows import row_tiles, tile_rows
from fdasync_kernels.attention.prefill import prefill_tiles
from fdasync_kernels.recurrence.spans import PlanSize, Spans
from fdasync_kernels.step_kernels import StepKernels

from fdasync.errors import InvariantBroken
from fdasync_transformers.execution.states.plan import Spanned, plan_states
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.execution.triton_paging import TritonPaging, Workspaces
from fdasync_transformers.fused.recurrent.flat import FlatSteps
from fdasync_transformers.fused.replacement import alone
from fdasync_transformers.model.attention import LatentCatcher, StepContext

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.step_shape import DeviceBatch, Way
    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.replacement import Agree
    from fdasync_transformers.model.kv import KVLayout, KVPool
    from fdasync_transformers.model.recurrent.pieces import Take
    from fdasync_transformers.model.recurrent.states import StateLayout


class DeviceStepModel(StepModel):
    """A model switched to paged attention by kernels; see `StepModel`."""

    kernels = StepKernels()
    by_kernels = True

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        most_decodes: int,
        *,
        live: LiveRows,
        fixed: bool = False,
        most_run: int = 1,
        state: StateLayout | None = None,
        agree: Agree = alone,
    ) -> None:
        """Takes a model on a device where kernels run.

        Args:
            most_decodes: most rows of a step that are computed as decodes, not counting rows of chunks.
            live: of the model's fused modules; set in each pass.
            fixed: with fixed numerics.
            most_run: most rows of one sequence that decode side by side, its drafts among them.
            state: of a sequence, where the model has recurrent layers.
            agree: what the ranks of a group make of a reason to compute those by the library's code.
        """
        super().__init__(model, layout, fixed=fixed, state=state)
        self._flat = None
        if self.recurrent is not None:
            self._flat = FlatSteps(self.recurrent.forwards, self.recurrent.layout, agree)
            self.notes = self._flat.notes
        self._live = live
        self.interpreted = model.device.type == "cpu"
        self._workspaces = Workspaces(most_decodes, model.device, fixed=fixed)
        self._run_rows = tile_rows(most_run)

    def arrays(self, batch: Batch, rows: NDArray[np.int64], way: Way = "both") -> dict[str, NDArray[np.generic]]:
        arrays = super().arrays(batch, rows, way)
        if "counts" in arrays:
            # of the sequences that are computed in tiles
            first = batch.num_decodes if way == "both" else 0
            tiles = prefill_tiles(batch.counts[first:])
            tiles[:, 0] += first
            arrays["tiles"] = tiles
        return arrays

    @contextmanager
    def begun(self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool) -> Iterator[tuple[StepContext, torch.Tensor]]:
        positions, ids, slots = self._laid(batch, lanes, pool)
        tiles = None
        if batch.runs and batch.decodes:
            tiles = row_tiles(batch.lanes[: batch.decodes], positions[: batch.decodes], self._run_rows)
        paging = TritonPaging(
            pool, lanes.tables, batch, positions, slots, self._workspaces, fixed=self.fixed, run_rows=self._run_rows,
            run_tiles=tiles,
        )  # fmt: skip
        # fused modules see which rows of the pass are stored
        self._live.slots = slots
        try:
            yield StepContext(layers=self._layers, paging=paging, positions=positions, latents=LatentCatcher()), ids
        finally:
            self._live.slots = None

    def _is_idle(self, batch: DeviceBatch) -> bool:
        # what is padding is on the device
        return not batch.tokens

    def _recurring(self, shape: DeviceBatch, batch: Batch, takes: tuple[Take, ...]) -> DeviceBatch:
        if self.states is None:
            return super()._recurring(shape, batch, takes)
        size = PlanSize(len(batch.lanes), len(batch.lanes) + len(takes))
        plan = plan_states(size, Spanned.of(batch), {}, takes, self.states)
        sent = {name: torch.from_numpy(array).to(self.model.device) for name, array in plan.items()}
        return replace(shape, spans=Spans.of(sent["spans"], size, sent.get("owners"), len(batch.lanes)))

    def _mixing(self, batch: DeviceBatch) -> AbstractContextManager[None]:
        if self._flat is None:
            return super()._mixing(batch)
        if batch.spans is None or self.states is None:
            raise InvariantBroken("a pass of a model with recurrent state, without its plan or its memory")
        return self._flat.step(batch.spans, self.states)
