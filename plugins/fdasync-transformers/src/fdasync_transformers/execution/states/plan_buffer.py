"""Where captured graphs read the plan of a step's recurrent states: one tensor at one address.

Knows plans; knows no model and no state. Made by `graphs.py` and `mixed_graphs.py` for models with recurrent layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from fdasync_kernels.recurrence.spans import FRESH, Spans, plan_spans

if TYPE_CHECKING:
    from fdasync_kernels.recurrence.spans import PlanSize

    from fdasync_transformers.execution.step import StepModel


class PlanBuffer:
    """See the module. Without sequences at first."""

    def __init__(self, size: PlanSize, rows: int, device: torch.device) -> None:
        """`rows`: most rows of a step whose sequences have several; 0: each sequence has one."""
        self._size = size
        nothing = np.zeros(0, np.int64)
        self._plan = torch.from_numpy(plan_spans(size, nothing, nothing, nothing)).to(device)
        self._owners = torch.full((rows,), -1, dtype=torch.int32, device=device) if rows else None

    @classmethod
    def of(cls, model: StepModel, rows: int = 0) -> PlanBuffer | None:
        """None: the model has no recurrent layers."""
        return None if model.plan_size is None else cls(model.plan_size, rows, model.model.device)

    def spans(self, sequences: int, rows: int = 0) -> Spans:
        """Views, of the first so many sequences, at most all, and rows."""
        owners = None if self._owners is None else self._owners[:rows]
        return Spans.of(self._plan, self._size, owners, min(sequences, self._size.sequences))

    def set(self, plan: torch.Tensor, owners: torch.Tensor | None) -> None:
        """Queue the plan of the next replay, from the device."""
        self._plan.copy_(plan, non_blocking=True)
        if self._owners is not None and owners is not None:
            self._owners[: len(owners)].copy_(owners, non_blocking=True)
            self._owners[len(owners) :].fill_(-1)

    def set_first(self, rows: int) -> None:
        """Queue the plan of a sequence that begins in lane 0 with so many rows; waits for the device, for start-up."""
        plan = plan_spans(self._size, np.array([FRESH]), np.array([rows]), np.array([0]))
        device = self._plan.device
        self.set(torch.from_numpy(plan).to(device), torch.zeros(rows, dtype=torch.int32, device=device))
