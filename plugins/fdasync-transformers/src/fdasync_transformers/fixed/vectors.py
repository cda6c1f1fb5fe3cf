"""Elementwise functions whose bits, on a CPU, depend on where an element stands in its tensor.

torch computes most of a tensor in whole vectors, and the rest (of each thread's part) one by one, by other functions
for these: an element's bits change with the number of tokens before it. Here every element goes through the vectors.
Found by trying. Knows no modules. Called by `mode.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ATEN = torch.ops.aten

#: a multiple of the vectors that torch computes at once, of every width of registers and dtype
_VECTOR = 256
# torch gives no more than this to one thread whole
_MOST = 1 << 15

#: takes one tensor and, for some, numbers
BY_PLACE = (
    _ATEN.silu.default,
    _ATEN.sigmoid.default,
    _ATEN.gelu.default,
    _ATEN.softplus.default,
    _ATEN.exp2.default,
    _ATEN.rsqrt.default,
    _ATEN.pow.Tensor_Scalar,
)
#: as these, in place
IN_PLACE = {
    _ATEN.silu_.default: _ATEN.silu.default,
    _ATEN.sigmoid_.default: _ATEN.sigmoid.default,
    _ATEN.gelu_.default: _ATEN.gelu.default,
    _ATEN.exp2_.default: _ATEN.exp2.default,
    _ATEN.rsqrt_.default: _ATEN.rsqrt.default,
}


def in_vectors(function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The function of each element of a tensor on a CPU, every element computed within whole vectors; a new tensor."""
    flat = x.reshape(-1)
    count = flat.numel()
    padded = torch.cat((flat, flat.new_ones(-count % _VECTOR)))
    parts = [function(part, *args, **kwargs) for part in torch.split(padded, _MOST)]
    return torch.cat(parts)[:count].view(x.shape) if parts else function(x, *args, **kwargs)
