"""The sequences of a trainer's batch on a GPU: attention by the rollout's kernels, over packed sequences.

Knows no modules and no gradients. Made once for each forward pass by `trainer.py`, as `segments.py` is on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.gpu.kernels.attention.packed import attend_packed
from fdasync_transformers.fixed.segments import Segments

if TYPE_CHECKING:
    import torch

    from fdasync_transformers.model.kv import Reach
    from fdasync_transformers.replay.layout import Spans


class DeviceSegments(Segments):
    """See `Segments`; in the fixed order of the attention kernels."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        super().__init__(spans, device)
        self._offsets = np.cumsum([0, *(length for _, length in self.spans)])
        # without padding rows stand as they are
        self._whole = int(self._offsets[-1]) == spans.total and bool((np.diff(self.rows_host) == 1).all())

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        reach: Reach,
        scaling: float,
        sinks: torch.Tensor | None,
        *,
        latent: bool = False,
    ) -> torch.Tensor:
        parts = [query, key, value]
        if not self._whole:
            parts = [part.index_select(0, self.rows) for part in parts]
        packed = parts[0] if parts[0].stride(-1) == 1 else parts[0].contiguous()
        out = attend_packed(
            packed,
            parts[1],
            None if latent else parts[2],
            self._offsets,
            scale=scaling,
            reach_kind=reach.kind,
            reach_size=reach.size,
            sinks=sinks,
            value_dim=value.shape[2],
        )
        if self._whole:
            return out
        return query.new_zeros(*query.shape[:2], value.shape[2]).index_copy_(0, self.rows, out)
