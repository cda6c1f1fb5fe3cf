"""Tells fused modules which rows of the running pass belong to a sequence: a captured graph has padding rows.

One object for each model; the step model sets it before the model runs, the fused modules read it. Knows no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class LiveRows:
    """See the module.

    Attributes:
        slots: int64 [T], on the device: negative for padding rows. None: all rows count.
    """

    slots: torch.Tensor | None = None
