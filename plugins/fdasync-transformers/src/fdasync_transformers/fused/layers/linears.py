"""Lets linear layers that are kept as stored be computed by the kernels, once these were compared with the library.

Every layer's product of random rows, few and many, is held against the library's product of the dequantised weight.
Knows kept layers; knows no steps. Called at start-up by `start/fuse.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from fdasync_transformers.fused.proofs import alone, guarded
from fdasync_transformers.fused.replaced import Noise
from fdasync_transformers.model.kept.linears import KeptLinear, kept_product, kept_weight

if TYPE_CHECKING:
    from fdasync_transformers.fused.proofs import Agree

# of each tile, and beyond the kernel's
_ROW_COUNTS = (1, 12, 40)
# most distance of all results from the library's, over their size: each rounds a sum of its own order
_TOLERANCE = 1e-2


def prove_linears(model: torch.nn.Module, agree: Agree = alone) -> tuple[int, str]:
    """Compare all kept layers and let the kernels compute them; how many there are, and for people why the kernels do
    not, or "". Waits for the device. `agree`: what the ranks of a group make of a reason."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, KeptLinear)]
    problem = ""
    for path, module in found:
        problem = guarded(partial(_difference, module), str)
        if problem:
            problem = f"{path} {problem}"
            break
    problem = agree(problem)
    if not problem:
        for _, module in found:
            module.proven = True
    return len(found), problem


@torch.inference_mode()
def _difference(module: KeptLinear) -> str:
    """How the kernels' products differ from the library's; "" if they do not."""
    weight = kept_weight(module)
    noise = Noise(weight.device)
    for count in _ROW_COUNTS:
        rows = noise.normal(count, weight.shape[1], dtype=torch.bfloat16)
        ours, library = (kept_product(rows, weight, module.bias, proven=proven).float() for proven in (True, False))
        distance = float((ours - library).norm() / library.norm())
        if not distance <= _TOLERANCE:
            return f"gives other results ({distance:.1e} of their size, at {count} rows)"
    return ""
