"""One step on the model: flat arrays of a `Batch` in, logits out, KV and aux rows written on the way.

Knows the model and the pool; knows nothing of sampling, arenas or futures. Called by `host_executor.py` for every
step, by `selfcheck.py` and `capacity.py` at start-up: all three run the same code.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdasync.errors import InvariantBroken
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.fixed.attention import KEYS, FixedPaging
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.model.attention import NAME, LatentCatcher, StepContext, TorchPaging, register
from fdasync_transformers.model.head import Head
from fdasync_transformers.model.indexers import IndexerSteps
from fdasync_transformers.model.kv import fresh_tails
from fdasync_transformers.model.ragged import RaggedPlan
from fdasync_transformers.model.recurrent.pieces import cut
from fdasync_transformers.model.recurrent.states import States
from fdasync_transformers.model.recurrent.steps import RecurrentSteps
from fdasync_transformers.mtp.head import head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.runner.chosen import LentRun
    from fdasync.runner.input_batch import Batch, InputBatch
    from fdasync_transformers.model.kv import KVLayout, KVPool
    from fdasync_transformers.model.recurrent.pieces import Take
    from fdasync_transformers.model.recurrent.states import StateLayout

# without cuDNN's: it plans anew whenever a length changes, at every prefill, for most of a millisecond of CPU
_ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class StepModel:
    """A model switched to paged attention.

    Attributes:
        model: owned by the caller; its attention implementation is set here.
        layout: of the pools that `run` takes.
        aux: producers of the steps' rows; may be replaced between steps.
        head: the logits of further rows of a step, where prompts are scored.
        fixed: whether bits of a token's numbers depend on its prefix and the weights alone.
        recurrent: the steps of the model's recurrent layers; None: it has none.
        indexers: the steps of the model's indexers; None: it has none.
        states: the recurrent state that steps go on from, by lane; set before the first step where there is any.
        interpreted: whether kernels run in Triton's interpreter, whose speed says nothing.
        notes: for people: what its steps compute in a slower way than could be, and why.
    """

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
        self.interpreted = False
        self.notes: tuple[str, ...] = ()
        self.fixed = fixed
        self._numerics = FixedNumerics() if fixed else None
        self.head = Head(model, self.inference)
        self._layers = {layer.index: layer for layer in layout.layers}
        self._latent = any(layer.latent_rank for layer in layout.layers)
        self._index_heads = 0 if self.indexers is None else self.indexers.heads

    @property
    def mtp_layers(self) -> int:
        """How many multi-token prediction layers the model has."""
        head = head_of(self.model)
        return 0 if head is None else head.depth

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

    def run(
        self,
        batch: Batch,
        table: InputBatch,
        pool: KVPool,
        rows: NDArray[np.int64],
        takes: Sequence[Take] = (),
        lent: Sequence[LentRun] = (),
    ) -> torch.Tensor:
        """Forward the batch's tokens (at least one), read from `table.tokens`; take snapshots of recurrent state; write
        what indexers pick to the memory that was lent for it.

        Returns logits [len(rows), V] of `rows` of the step, in the model's dtype on its device; computes no other
        logits. Writes the tokens' KV to the pool and their rows to `aux`. Done on return on a CPU, queued on a GPU.
        """
        device = self.model.device
        size = pool.block_tokens
        token_lanes = np.repeat(batch.lanes, batch.counts)
        input_ids = table.tokens[token_lanes, batch.positions].astype(np.int64)
        ends = batch.starts + batch.counts
        tables = table.blocks[batch.lanes, : -(-int(ends.max()) // size)]
        pool.clear(fresh_tails(batch.starts, ends, tables, size))
        context = self.context(batch.counts, batch.starts, batch.positions, batch.kv_index, tables, pool)
        positions = context.positions
        self.aux.begin(positions)
        mixing, picking = self._mixing(batch, takes), self._picking(context, lent)
        with sdpa_kernel(_ATTENTION_BACKENDS), self.inference(), mixing, picking:
            output = self.model(
                input_ids=_send(input_ids, device)[None],
                # the library builds no mask for this attention, and models with indexers take a part of one
                attention_mask=None if self.indexers is None else torch.zeros(1, 1, 1, 1, device=device),
                position_ids=positions[None],
                past_key_values=context.latents if self._latent else None,
                use_cache=False,
                logits_to_keep=_send(rows, device),
                fd_ctx=context,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

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

    def _mixing(self, batch: Batch, takes: Sequence[Take]) -> AbstractContextManager[None]:
        if self.recurrent is None:
            if takes:
                raise InvariantBroken(f"step {batch.step_id} takes snapshots of a model without recurrent state")
            return nullcontext()
        if self.states is None:
            raise InvariantBroken("a step of a model with recurrent state, which has no memory")
        return self.recurrent.step(cut(batch, takes), self.states)

    def _picking(self, context: StepContext, lent: Sequence[LentRun]) -> AbstractContextManager[None]:
        if self.indexers is None:
            return nullcontext()
        if not isinstance(context.paging, TorchPaging):
            raise InvariantBroken(f"a step of a model with indexers by {type(context.paging).__name__}")
        return self.indexers.step(context.paging, context.positions, partial(_write, lent) if lent else None)

    def context(
        self,
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv_index: NDArray[np.int64],
        tables: NDArray[np.integer],
        pool: KVPool,
    ) -> StepContext:
        """What attention layers need of a pass of T tokens of S sequences.

        Args:
            counts, starts: [S], tokens of each and the position of its first.
            positions, kv_index: [T], of each token, and where its KV goes.
            tables: [S, blocks], enough of each block table.
        """
        device, size = self.model.device, pool.block_tokens
        blocks, offsets = np.divmod(kv_index, size)
        # indexers take masks, and score a pair of tokens once for each of their heads
        tile = KEYS if self.fixed else min(1, self._index_heads)
        plan = RaggedPlan(
            counts, starts, tables, size, device, self.layout.dtype, tile, pool.shares, max(1, self._index_heads)
        )
        return StepContext(
            layers=self._layers,
            paging=(FixedPaging if self.fixed else TorchPaging)(
                pool=pool, plan=plan, blocks=_send(blocks, device), offsets=_send(offsets, device)
            ),
            positions=_send(positions, device),
            latents=LatentCatcher(),
        )


def _write(lent: Sequence[LentRun], number: int, picked: torch.Tensor) -> None:
    values = picked.cpu().numpy()
    for run in lent:
        run.write(number, values)


def _send(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
