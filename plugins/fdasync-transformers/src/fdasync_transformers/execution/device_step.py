"""One step on the model by kernels, on a GPU (or, for tests, on a CPU in Triton's interpreter).

The model and the library's code are the same as in `step.py`. Here the device computes positions, slots and token ids,
attention is `TritonPaging`, and nothing waits. CUDA graphs can replay the steps (`graphs.py`, `mixed_graphs.py`). Knows
the model and the pool; knows nothing of sampling, arenas or futures. Called by `passes.py` for every step, by
`selfcheck.py` and `capacity.py` at start-up.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from fdasync_kernels.attention.decode_rows import row_tiles, tile_rows
from fdasync_kernels.attention.prefill import prefill_tiles
from fdasync_kernels.layout import step_layout
from fdasync_kernels.recurrence.spans import PlanSize, Spans

from fdasync.errors import InvariantBroken
from fdasync_transformers.execution.device_lanes import DeviceLanes
from fdasync_transformers.execution.drafts.mtp_passes import DeviceMtp
from fdasync_transformers.execution.states.plan import Spanned, plan_states
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.execution.triton_paging import DeviceBatch, TritonPaging, Workspaces
from fdasync_transformers.fused.recurrent.flat import FlatSteps
from fdasync_transformers.fused.replacement import alone
from fdasync_transformers.model.attention import LatentCatcher, StepContext
from fdasync_transformers.mtp.head import head_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.runner.chosen import LentRun
    from fdasync.runner.input_batch import Batch, InputBatch
    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.replacement import Agree
    from fdasync_transformers.model.kv import KVLayout, KVPool
    from fdasync_transformers.model.recurrent.pieces import Take
    from fdasync_transformers.model.recurrent.states import StateLayout


#: how a step's tokens attend. "both": sequences that decode by the kernel for one query, others in tiles. "decodes":
#: every token as a decode of its own; a layer writes the KV of all tokens before any of them attends, so the tokens of
#: one sequence see each other. "tiles": every sequence in tiles.
Way = Literal["both", "decodes", "tiles"]


class Passed(NamedTuple):
    """A step's pass.

    Attributes:
        logits: [N, V] of the rows asked for, in the model's dtype.
        states: hidden states [T, D] that multi-token prediction layers go on from; empty: the model has none.
    """

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()


class DeviceStepModel(StepModel):
    """A model switched to paged attention by kernels; see `StepModel`.

    Attributes:
        mtp: passes of the multi-token prediction layers; None: the model has none.
        plan_size: of the plans of recurrent states that graphs read; set before any is captured. None: the model has
            no recurrent layers.
    """

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
        self.plan_size: PlanSize | None = None
        self._live = live
        self.interpreted = model.device.type == "cpu"
        self._workspaces = Workspaces(most_decodes, model.device, fixed=fixed)
        self._run_rows = tile_rows(most_run)
        head = head_of(model)
        self.mtp = None if head is None else DeviceMtp(self, head)

    def lanes_of(self, table: InputBatch) -> DeviceLanes:
        """Tables on the device for the steps of this model."""
        device = self.model.device
        states = None if self.mtp is None else self.mtp.new_states(len(table.length), device)
        return DeviceLanes(table, device, states)

    def run(
        self,
        batch: Batch,
        table: InputBatch,
        pool: KVPool,
        rows: NDArray[np.int64],
        takes: Sequence[Take] = (),
        lent: Sequence[LentRun] = (),
    ) -> torch.Tensor:
        """As `StepModel.run`, for start-up: sends the whole table, and waits for the device. Models with indexers have
        no such steps (`start/indexed.py`)."""
        if lent:
            raise InvariantBroken(f"step {batch.step_id} shall tell what indexers pick, by kernels")
        device = self.model.device
        lanes = self.lanes_of(table)
        lanes.mirror(table)
        arrays = batch_arrays(batch, rows)
        plan: dict[str, NDArray[np.int32]] = {}
        size = PlanSize(len(batch.lanes), len(batch.lanes) + len(takes))
        if self.states is not None:
            plan = plan_states(size, Spanned.of(batch), {}, takes, self.states)
        elif takes:
            raise InvariantBroken(f"step {batch.step_id} takes snapshots of a model without recurrent state")
        sent = {name: torch.from_numpy(array).to(device) for name, array in {**arrays, **plan}.items()}
        spans = Spans.of(sent["spans"], size, sent.get("owners"), len(batch.lanes)) if plan else None
        return self.forward(device_batch(batch, sent, spans=spans), lanes, pool).logits

    def forward(self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool) -> Passed:
        """Queue the step on the current stream.

        `aux` then holds the rows, the pool the KV. Nothing waits for the device.
        """
        context, ids = self.begin(batch, lanes, pool)
        self.aux.begin(context.positions)
        keeping = nullcontext() if self.mtp is None else self.head.keeping()
        with self._living(context), keeping, self._recurring(batch):
            with self.inference():
                output = self.model(
                    input_ids=ids[None],
                    position_ids=context.positions[None],
                    past_key_values=context.latents if self._latent else None,
                    use_cache=False,
                    logits_to_keep=0 if batch.rows is None else batch.rows,
                    fd_ctx=context,
                )
            self.aux.end()
            states: tuple[torch.Tensor, ...] = ()
            if self.mtp is not None:
                states = self.mtp.over_step(self.head.hidden, ids, context, batch, lanes)
        return Passed(output.logits[0], states)

    def draft(
        self, depth: int, rows: DeviceBatch, lanes: DeviceLanes, pool: KVPool, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the pass of a draft, as `DeviceMtp.draft`: the states of all rows, and those [D, width] that say what
        comes next. Raises InvariantBroken for a model without such layers."""
        if self.mtp is None:
            raise InvariantBroken("a draft of a model without layers that draft")
        context, ids = self.begin(rows, lanes, pool)
        with self._living(context):
            states = self.mtp.draft(depth, rows, lanes, context, ids, before)
        each = self.mtp.rows_of(depth)
        return states, states[each - 1 :: each]

    def begin(self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool) -> tuple[StepContext, torch.Tensor]:
        """What attention needs of a pass, and the token ids [T] of its rows; one launch."""
        positions = torch.empty(batch.tokens, dtype=torch.int64, device=self.model.device)
        ids, slots = torch.empty_like(positions), torch.empty_like(positions)
        step_layout(
            batch.lanes,
            batch.starts,
            batch.first_rows,
            lanes.tables,
            lanes.tokens,
            pool.block_tokens,
            positions,
            ids,
            slots,
        )
        tiles = None
        if batch.runs and batch.decodes:
            tiles = row_tiles(batch.lanes[: batch.decodes], positions[: batch.decodes], self._run_rows)
        paging = TritonPaging(
            pool, lanes.tables, batch, positions, slots, self._workspaces, fixed=self.fixed, run_rows=self._run_rows,
            run_tiles=tiles,
        )  # fmt: skip
        return StepContext(layers=self._layers, paging=paging, positions=positions, latents=LatentCatcher()), ids

    def _recurring(self, batch: DeviceBatch) -> AbstractContextManager[None]:
        if self._flat is None:
            return nullcontext()
        if batch.spans is None or self.states is None:
            raise InvariantBroken("a pass of a model with recurrent state, without its plan or its memory")
        return self._flat.step(batch.spans, self.states)

    @contextmanager
    def _living(self, context: StepContext) -> Iterator[None]:
        """Fused modules see which rows of the pass are stored."""
        assert isinstance(context.paging, TritonPaging)
        self._live.slots = context.paging.slots
        try:
            yield
        finally:
            self._live.slots = None


def batch_arrays(batch: Batch, rows: NDArray[np.int64], way: Way = "both") -> dict[str, NDArray[np.generic]]:
    """The arrays of a step's shape that are sent to the device, by the names that `device_batch` takes.

    Args:
        rows: rows of the step whose logits are wanted.
    """
    tokens = len(batch.positions)
    if way == "decodes":
        arrays: dict[str, NDArray[np.generic]] = {
            "lanes": np.repeat(batch.lanes, batch.counts).astype(np.int32),
            "starts": batch.positions,
            "first_rows": np.arange(tokens + 1, dtype=np.int32),
        }
    else:
        arrays = {
            "lanes": batch.lanes.astype(np.int32),
            "starts": batch.starts,
            "first_rows": np.concatenate([[0], np.cumsum(batch.counts)]).astype(np.int32),
        }
        decodes = batch.num_decodes if way == "both" else 0
        if decodes < len(batch.lanes):
            arrays["counts"] = batch.counts.astype(np.int32)
            tiles = prefill_tiles(batch.counts[decodes:])
            tiles[:, 0] += decodes
            arrays["tiles"] = tiles
    if len(rows) < tokens or way == "tiles":
        arrays["rows"] = rows
    return arrays


def device_batch(
    batch: Batch,
    sent: dict[str, torch.Tensor],
    way: Way = "both",
    *,
    runs: bool = False,
    spans: Spans | None = None,
) -> DeviceBatch:
    """The shape of a step, from the tensors of `batch_arrays` on the device. `runs`, `spans`: as of a `DeviceBatch`."""
    tokens = len(batch.positions)
    return DeviceBatch(
        tokens=tokens,
        decodes={"both": batch.num_decodes, "decodes": tokens, "tiles": 0}[way],
        lanes=sent["lanes"],
        starts=sent["starts"],
        first_rows=sent["first_rows"],
        counts=sent.get("counts"),
        tiles=sent.get("tiles"),
        rows=sent.get("rows"),
        runs=runs,
        spans=spans,
    )
