"""One step on the model: the shape of a step and the tables of its lanes in, logits out, KV and aux rows written.

`StepModel` computes by torch, on CPUs; `device_step.py` by kernels. Knows the model and the pool; knows nothing of
sampling, arenas or futures. Called by `passes.py` for every step, by `selfcheck.py` and `capacity.py` at start-up: all
three run the same code.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from fdasync_kernels.step_kernels import HostKernels, StepKernels
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdasync.errors import InvariantBroken
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.execution.device_lanes import DeviceLanes
from fdasync_transformers.execution.drafts.mtp_passes import DeviceMtp
from fdasync_transformers.execution.step_shape import Passed, batch_arrays, device_batch, sequences_of
from fdasync_transformers.fixed.attention import KEYS, FixedPaging
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.model.attention import NAME, LatentCatcher, StepContext, TorchPaging, register
from fdasync_transformers.model.head import Head
from fdasync_transformers.model.indexers import IndexerSteps
from fdasync_transformers.model.kv import Reach, fresh_tails
from fdasync_transformers.model.ragged import RaggedPlan
from fdasync_transformers.model.recurrent.pieces import cut
from fdasync_transformers.model.recurrent.states import States
from fdasync_transformers.model.recurrent.steps import RecurrentSteps
from fdasync_transformers.mtp.head import head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from fdasync_kernels.recurrence.spans import PlanSize
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.runner.input_batch import Batch, InputBatch
    from fdasync_transformers.execution.step_shape import DeviceBatch, Way
    from fdasync_transformers.model.kv import KVLayout, KVPool
    from fdasync_transformers.model.recurrent.pieces import Take
    from fdasync_transformers.model.recurrent.states import StateLayout
    from fdasync_transformers.model.sequences import Sequences

# without cuDNN's: it plans anew whenever a length changes, at every prefill, for most of a millisecond of CPU
_ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class StepModel:
    """A model switched to paged attention.

    Attributes:
        model: owned by the caller; its attention implementation is set here.
        layout: of the pools that steps take.
        aux: producers of the steps' rows; may be replaced between steps.
        head: the logits of further rows of a step, where prompts are scored.
        fixed: whether bits of a token's numbers depend on its prefix and the weights alone.
        recurrent: the steps of the model's recurrent layers; None: it has none.
        indexers: the steps of the model's indexers; None: it has none.
        states: the recurrent state that steps go on from, by lane; set before the first step where there is any.
        plan_size: of the plans of recurrent states that kernels read; set before any is captured. None: no kernel
            computes them, or there are none.
        mtp: passes of the multi-token prediction layers; None: the model has none.
        kernels: the small ones around its passes.
        by_kernels: whether kernels compute its attention and its recurrent layers.
        interpreted: whether kernels run in Triton's interpreter, whose speed says nothing.
        notes: for people: what its steps compute in a slower way than could be, and why.
    """

    kernels: StepKernels = HostKernels()
    by_kernels = False

    def __init__(
        self, model: PreTrainedModel, layout: KVLayout, *, fixed: bool = False, state: StateLayout | None = None
    ) -> None:
        """`fixed`: with fixed numerics; `state`: of a sequence, where the model has recurrent layers."""
        register()
        model.set_attn_implementation(NAME)
        self.model = model
        self.layout = layout
        self.aux = AuxData()
        self.recurrent = None if state is None else RecurrentSteps(model, state)
        indexers = IndexerSteps(model, layout)
        self.indexers = indexers if indexers.heads else None
        self.states: States | None = None
        self.plan_size: PlanSize | None = None
        self.interpreted = False
        self.notes: tuple[str, ...] = ()
        self.fixed = fixed
        self._numerics = FixedNumerics() if fixed else None
        self.head = Head(model, self.inference)
        self._layers = {layer.index: layer for layer in layout.layers}
        self._latent = any(layer.latent_rank for layer in layout.layers)
        self._index_heads = 0 if self.indexers is None else self.indexers.heads
        self._masks_prompts = any(layer.reach != Reach() for layer in layout.layers)
        mtp = head_of(model)
        self.mtp = None if mtp is None else DeviceMtp(self, mtp)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """What the model's code runs within."""
        if self._numerics is None:
            with torch.inference_mode():
                yield
        else:
            # in inference mode, operations that are made of others would come to the mode too, which costs time
            with torch.no_grad(), self._numerics:
                yield

    def lanes_of(self, table: InputBatch) -> DeviceLanes:
        """Tables on the device for the steps of this model."""
        device = self.model.device
        states = None if self.mtp is None else self.mtp.new_states(len(table.length), device)
        return DeviceLanes(table, device, states)

    def arrays(self, batch: Batch, rows: NDArray[np.int64], way: Way = "both") -> dict[str, NDArray[np.generic]]:
        """What is sent of a step's shape: as `batch_arrays`."""
        return batch_arrays(batch, rows, way)

    def run(
        self, batch: Batch, table: InputBatch, pool: KVPool, rows: NDArray[np.int64], takes: Sequence[Take] = ()
    ) -> torch.Tensor:
        """Logits [len(rows), V] of `rows` of a step (at least one token), whose tokens are read from `table.tokens`.

        As `forward`, for start-up: sends the whole table, and waits for the device.
        """
        device = self.model.device
        lanes = self.lanes_of(table)
        lanes.mirror(table)
        sent = {name: torch.from_numpy(array).to(device) for name, array in self.arrays(batch, rows).items()}
        shape = self._recurring(device_batch(batch, sent), batch, tuple(takes))
        return self.forward(shape, lanes, pool).logits

    def forward(self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool) -> Passed:
        """Compute a step on the current stream; done on return on a CPU.

        `aux` then holds the rows, the pool the KV. Nothing waits for a device.
        """
        if self._is_idle(batch):
            count = batch.tokens if batch.rows is None else len(batch.rows)
            width = int(self.model.config.vocab_size)
            logits = torch.zeros(count, width, dtype=self.model.dtype, device=self.model.device)
            return Passed(logits, self._no_states(batch.tokens))
        with self.begun(batch, lanes, pool) as (context, ids):
            self.aux.begin(context.positions)
            keeping = nullcontext() if self.mtp is None else self.head.keeping()
            with self._mixing(batch), self._picking(batch, context), keeping:
                with self.inference():
                    output = self.model(
                        input_ids=ids[None],
                        # the library builds no mask for this attention, and models with indexers take a part of one
                        attention_mask=None if self.indexers is None else torch.zeros(1, 1, 1, 1, device=ids.device),
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
        with self.begun(rows, lanes, pool) as (context, ids):
            states = self.mtp.draft(depth, rows, lanes, context, ids, before)
        each = self.mtp.rows_of(depth)
        return states, states[each - 1 :: each]

    @contextmanager
    def begun(self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool) -> Iterator[tuple[StepContext, torch.Tensor]]:
        """What attention needs of a pass, and the token ids [T] of its rows; the pass is computed within."""
        positions, ids, slots = self._laid(batch, lanes, pool)
        found, size = sequences_of(batch), pool.block_tokens
        ends = found.starts + found.counts
        tables = lanes.tables.numpy()[found.lanes, : -(-int(ends.max(initial=1)) // size)]
        pool.clear(fresh_tails(found.starts, ends, tables, size))
        paging = self._paging(found, slots, tables, pool)
        with sdpa_kernel(_ATTENTION_BACKENDS):
            yield StepContext(layers=self._layers, paging=paging, positions=positions, latents=LatentCatcher()), ids

    def _laid(
        self, batch: DeviceBatch, lanes: DeviceLanes, pool: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, token ids and slots of the KV [T]; one launch."""
        positions = torch.empty(batch.tokens, dtype=torch.int64, device=self.model.device)
        ids, slots = torch.empty_like(positions), torch.empty_like(positions)
        self.kernels.step_layout(
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
        return positions, ids, slots

    def _paging(self, found: Sequences, slots: torch.Tensor, tables: NDArray[np.integer], pool: KVPool) -> TorchPaging:
        """`tables`: [S, blocks], enough of each block table."""
        size = pool.block_tokens
        # indexers take masks, and score a pair of tokens once for each of their heads
        tile = KEYS if self.fixed else min(1, self._index_heads)
        plan = RaggedPlan(
            found.counts, found.starts, tables, size, slots.device, self.layout.dtype, tile, pool.shares,
            max(1, self._index_heads), found.first_rows, masks_prompts=self._masks_prompts,
        )  # fmt: skip
        rows = None if len(found.rows) == len(slots) else torch.from_numpy(found.rows)
        blocks, offsets = (torch.from_numpy(part) for part in np.divmod(slots.numpy(), size))
        return (FixedPaging if self.fixed else TorchPaging)(
            pool=pool, plan=plan, blocks=blocks, offsets=offsets, rows=rows
        )

    def _is_idle(self, batch: DeviceBatch) -> bool:
        """Whether all rows are known to be padding: no module has to bear a pass of no tokens."""
        return not (batch.lanes.numpy() >= 0).any()

    def _no_states(self, tokens: int) -> tuple[torch.Tensor, ...]:
        if self.mtp is None:
            return ()
        width, device = int(self.model.config.hidden_size), self.model.device
        none = torch.zeros(tokens, width, dtype=self.model.dtype, device=device)
        return (none,) * self.mtp.layers

    def make_states(
        self,
        num_lanes: int,
        num_places: int = 0,
        allocate: Callable[[int], torch.Tensor] | None = None,
        versions: int = 1,
    ) -> States | None:
        """Fresh memory of recurrent state, as `States`; None: the model has none."""
        if self.recurrent is None:
            return None
        return States(self.recurrent.layout, num_lanes, num_places, self.model.device, allocate, versions)

    def _recurring(self, shape: DeviceBatch, batch: Batch, takes: tuple[Take, ...]) -> DeviceBatch:
        """The shape of a lone step with what its recurrent layers need."""
        del batch
        return replace(shape, takes=takes)

    def _mixing(self, batch: DeviceBatch) -> AbstractContextManager[None]:
        """Within it the model's recurrent layers compute this step."""
        if self.recurrent is None and batch.takes:
            raise InvariantBroken("a step takes snapshots of a model without recurrent state")
        if self.recurrent is None:
            return nullcontext()
        if self.states is None:
            raise InvariantBroken("a step of a model with recurrent state, which has no memory")
        found = sequences_of(batch)
        return self.recurrent.step(cut(found, batch.takes), self.states, found.rows)

    def _picking(self, batch: DeviceBatch, context: StepContext) -> AbstractContextManager[None]:
        """Within it the model's indexers compute this step."""
        if self.indexers is None:
            return nullcontext()
        if not isinstance(context.paging, TorchPaging):
            raise InvariantBroken(f"a step of a model with indexers by {type(context.paging).__name__}")
        return self.indexers.step(context.paging, context.positions, batch.tell)
