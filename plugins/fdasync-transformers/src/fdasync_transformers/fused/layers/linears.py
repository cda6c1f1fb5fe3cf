"""Lets linear layers that are kept as stored be computed by the kernels, once these were compared with the library.

Every layer's product of random rows, few and many, is held against the library's product of the dequantised weight.
Knows kept layers; knows no steps. Called at start-up by `start/fuse.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.modules import Noise, check_size
from fdasync_transformers.fused.replacement import Place, Replacement
from fdasync_transformers.model.kept.linears import KeptLinear, kept_product, kept_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_transformers.fused.replacement import Case

# of each tile, and beyond the kernel's
_ROW_COUNTS = (1, 12, 40)
# most distance of all results from the library's, over their size: each rounds a sum of its own order
_TOLERANCE = 1e-2


class KeptLinears(Replacement[bool]):
    """Layers that are kept as stored, which the kernels compute once they are proven."""

    what = which = "stored linear layers"
    together = True

    def finds(self, model: Any) -> Iterator[Place]:
        for path, module in model.named_modules():
            if isinstance(module, KeptLinear):
                yield Place(path, module, "", path)

    def candidates(self, place: Place) -> tuple[bool, ...]:
        """The kernels."""
        del place
        return (True,)

    def cases(self, place: Place) -> list[Case[bool]]:
        noise = Noise(kept_weight(place.module).device)
        columns = kept_weight(place.module).shape[1]
        rows = [noise.normal(count, columns, dtype=torch.bfloat16) for count in _ROW_COUNTS]
        return [partial(_compare, place.module, each) for each in rows]

    def put(self, place: Place, candidate: bool) -> None:
        place.module.proven = candidate


def _compare(module: KeptLinear, rows: torch.Tensor, proven: bool) -> None:
    weight = kept_weight(module)
    ours, library = (kept_product(rows, weight, module.bias, proven=one) for one in (proven, False))
    check_size(ours, library, _TOLERANCE, f", at {len(rows)} rows")
