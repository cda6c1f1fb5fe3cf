"""The sequences of a trainer's batch on a GPU: attention by the rollout's kernels, over packed sequences.

Knows no modules and no gradients. Made once for each forward pass by `trainer.py`, as `segments.py` is on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from fdasync_kernels.attention.packed import PackedLayout, attend_packed
from fdasync_transformers.fused.modules import past_modes

from fdasync_trainer.numerics.segments import Segments

if TYPE_CHECKING:
    import torch
    from fdasync_transformers.model.kv import Reach

    from fdasync_trainer.replay.layout import Spans


class DeviceSegments(Segments):
    """See `Segments`; in the fixed order of the attention kernels."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        super().__init__(spans, device)
        firsts, counts = np.array(self.spans, np.int64).reshape(-1, 2).T
        self._layout = PackedLayout(firsts, counts, spans.total, device)

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
        with past_modes():
            return attend_packed(
                query if query.stride(-1) == 1 else query.contiguous(),
                key,
                None if latent else value,
                self._layout,
                scale=scaling,
                reach_kind=reach.kind,
                reach_size=reach.size,
                sinks=sinks,
                value_dim=value.shape[2],
            )
