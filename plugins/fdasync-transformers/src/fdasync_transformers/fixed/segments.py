"""The sequences of a trainer's batch, for attention: their places in the batch, and in blocks as a rollout has them.

Knows no modules and no gradients. Made once for each forward pass by `trainer.py`; used by each layer's attention, and
again in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fdasync_transformers.fixed.attention import KEYS
from fdasync_transformers.fixed.paging import attend_blocks
from fdasync_transformers.model.ragged import RaggedPlan

if TYPE_CHECKING:
    from fdasync_transformers.model.kv import Reach
    from fdasync_transformers.replay.layout import Spans


class Segments:
    """See the module.

    Attributes:
        spans: first row and length of each sequence that has tokens, in the flattened batch.
        positions: int64 [R], of each row in its sequence; 0 of padding.
    """

    def __init__(self, spans: Spans, device: torch.device) -> None:
        real = spans.lengths > 0
        firsts, lengths = spans.offsets[real].astype(np.int64), spans.lengths[real].astype(np.int64)
        self.spans = tuple(zip(firsts.tolist(), lengths.tolist(), strict=True))
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = within + np.repeat(firsts, lengths)
        positions = np.zeros(spans.total, np.int64)
        positions[rows] = within
        self.positions = torch.from_numpy(positions).to(device)
        blocks = -(-lengths // KEYS)
        ends = np.cumsum(blocks)
        self._num_blocks = int(blocks.sum())
        self._rows = torch.from_numpy(rows).to(device)
        self._slots = torch.from_numpy(within + np.repeat((ends - blocks) * KEYS, lengths)).to(device)
        columns = np.arange(blocks.max(initial=0))
        tables = (ends - blocks)[:, None] + np.minimum(columns, blocks[:, None] - 1)
        zeros = np.zeros_like(lengths)
        self._plan = RaggedPlan(lengths, zeros, tables, KEYS, device, torch.float32, KEYS) if len(lengths) else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        reach: Reach,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries [R, H, Dk], keys [R, KH, Dk], values [R, KH, Dv] of the batch's rows: [R, H, Dv], zeros of padding.

        Computed as `FixedPaging` does: the same tiles. Without gradients.
        """
        result = query.new_zeros(*query.shape[:2], value.shape[2])
        if self._plan is not None:
            out = query.new_empty(len(self._rows), *result.shape[1:])
            groups = self._plan.groups(reach)
            rows = query.index_select(0, self._rows)
            attend_blocks(groups, rows, self._blocks(key), self._blocks(value), scaling, sinks, out)
            result.index_copy_(0, self._rows, out)
        return result

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[blocks, KEYS, KH, D], zeros behind the end of a sequence."""
        flat = rows.new_zeros(self._num_blocks * KEYS, *rows.shape[1:])
        return flat.index_copy_(0, self._slots, rows.index_select(0, self._rows)).view(-1, KEYS, *rows.shape[1:])
