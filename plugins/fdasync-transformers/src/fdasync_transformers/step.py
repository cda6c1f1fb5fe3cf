"""One step on the model: flat arrays of a `Batch` in, logits out, KV and routing written on the way.

Knows the model and the pool; knows nothing of sampling, arenas or futures. Called by `runner.py` for
every step, by `selfcheck.py` and `profile.py` at start-up: all three run the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdasync_transformers.attention import NAME, LatentCatcher, StepContext, TorchPaging, register
from fdasync_transformers.ragged import RaggedPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.runner.input_batch import Batch, LaneTable
    from fdasync_transformers.capture import RoutingCapture
    from fdasync_transformers.kv import KVLayout, KVPool

# cuDNN's attention plans anew, for most of a millisecond of CPU, whenever a length changes: every prefill
_ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class StepModel:
    """A model switched to paged attention.

    Attributes:
        model: owned by the caller; its attention implementation is set here.
        layout: of the pools that `run` takes.
        capture: routing of the last step, or None where capture is off; may be replaced between steps.
        fuses: routers are replaced by a kernel where they can be.
        interpreted: kernels run in Triton's interpreter, whose speed says nothing.
    """

    def __init__(self, model: PreTrainedModel, layout: KVLayout) -> None:
        register()
        model.set_attn_implementation(NAME)
        self.model = model
        self.layout = layout
        self.capture: RoutingCapture | None = None
        self.fuses = False
        self.interpreted = False
        self._layers = {layer.index: layer for layer in layout.layers}
        self._latent = any(layer.latent_rank for layer in layout.layers)

    def run(self, batch: Batch, table: LaneTable, pool: KVPool, rows: NDArray[np.int64]) -> torch.Tensor:
        """Forward the batch's tokens (at least one), read from `table.tokens`.

        Returns logits [len(rows), V] of those rows of the step, in the model's dtype on its device; no logits
        are computed for other rows. The pool then holds the tokens' KV, `capture` their routing. On CPU this
        is done on return; on a GPU it is under way.
        """
        device = self.model.device
        size = pool.block_tokens
        token_lanes = np.repeat(batch.lanes, batch.counts)
        input_ids = table.tokens[token_lanes, batch.positions].astype(np.int64)
        ends = batch.starts + batch.counts
        tables = table.blocks[batch.lanes, : -(-int(ends.max()) // size)]
        pool.clear(_fresh_tails(batch.starts, ends, tables, size))
        blocks, offsets = np.divmod(batch.kv_index, size)
        latents = LatentCatcher()
        positions = _send(batch.positions, device)
        context = StepContext(
            layers=self._layers,
            paging=TorchPaging(
                pool=pool,
                plan=RaggedPlan(batch.counts, batch.starts, tables, size, device, self.layout.dtype),
                blocks=_send(blocks, device),
                offsets=_send(offsets, device),
            ),
            positions=positions,
            latents=latents,
        )
        if self.capture is not None:
            self.capture.begin(positions)
        with torch.inference_mode(), sdpa_kernel(_ATTENTION_BACKENDS):
            output = self.model(
                input_ids=_send(input_ids, device)[None],
                position_ids=positions[None],
                past_key_values=latents if self._latent else None,
                use_cache=False,
                logits_to_keep=_send(rows, device),
                fd_ctx=context,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def _fresh_tails(
    starts: NDArray[np.int64], ends: NDArray[np.int64], tables: NDArray[np.integer], size: int
) -> list[int]:
    """Blocks that get their first token in this step and are not filled by it: one per sequence at most."""
    columns = ends // size
    fresh = (ends % size != 0) & (columns * size >= starts)
    tails: list[int] = tables[np.flatnonzero(fresh), columns[fresh]].tolist()
    return tails


def _send(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
