"""Sums and other reductions on a CPU whose order depends on neither the tensor's layout nor the rows beside one.

torch chooses the order of a sum by strides and sizes: over rows, over columns, and of one row alone by threads. Here
what is reduced stands in rows [R, K] that are contiguous, two of them at least. It is assumed that torch reduces such
rows one by one, which tests and the self-check look at. Knows no modules. Called by `mode.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ATEN = torch.ops.aten
# a row that is alone is cut among threads from this size on
_ONE_THREAD = 1 << 15

# reduces all dims: by which dims are named
_OVERALL = {
    _ATEN.sum.default: _ATEN.sum.dim_IntList,
    _ATEN.mean.default: _ATEN.mean.dim,
    _ATEN.prod.default: _ATEN.prod.dim_int,
    _ATEN.norm.Scalar: _ATEN.norm.ScalarOpt_dim,
    _ATEN.norm.ScalarOpt_dtype: _ATEN.norm.ScalarOpt_dim_dtype,
}
_BY_DIMS = frozenset(
    (
        *_OVERALL.values(),
        _ATEN.linalg_vector_norm.default,
        _ATEN.logsumexp.default,
        _ATEN.nansum.default,
        _ATEN.std.correction,
        _ATEN.std_mean.correction,
        _ATEN.var.correction,
        _ATEN.var_mean.correction,
    )
)
_SOFTMAX = frozenset((_ATEN._softmax.default, _ATEN._log_softmax.default))


def reduction(func: Any) -> Callable[..., Any] | None:
    """What computes a reduction that writes into none of its arguments; None: it is no reduction with an order."""
    if func in _SOFTMAX:
        return partial(_softmax, func)
    named = _OVERALL.get(func, func)
    if named not in _BY_DIMS:
        return None
    names = [one.name for one in named._schema.arguments]
    one_dim = str(next(one.type for one in named._schema.arguments if one.name == "dim")) == "int"
    return partial(_reduced, func, named, names, one_dim)


def _reduced(func: Any, named: Any, names: list[str], one_dim: bool, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not x.is_cpu or not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return func(x, *args, **kwargs)
    given = dict(zip(names[1:], args, strict=False)) | kwargs
    asked = given.get("dim")
    dims = [asked] if isinstance(asked, int) else list(asked or ())
    reduced = sorted({dim % x.dim() for dim in dims}) if x.dim() else []
    if not dims:
        reduced = list(range(x.dim()))
    if reduced == [x.dim() - 1] and func is named and x.is_contiguous() and _in_one_thread(x.shape[-1], x.numel()):
        return func(x, *args, **kwargs)
    kept = [dim for dim in range(x.dim()) if dim not in reduced]
    shape = [x.shape[dim] for dim in kept]
    whole = x.permute(kept + reduced).reshape(*shape, -1).contiguous()
    rows = whole.view(-1, whole.shape[-1])
    count = len(rows)
    if not _in_one_thread(rows.shape[1], rows.numel()):
        rows = torch.cat((rows, rows))
    if given.pop("keepdim", False):
        shape = [1 if dim in reduced else x.shape[dim] for dim in range(x.dim())]
    found = named(rows, **given | {"dim": 1 if one_dim else [1]})
    if isinstance(found, tuple):
        return tuple(one[:count].reshape(shape) for one in found)
    return found[:count].reshape(shape)


def _in_one_thread(width: int, count: int) -> bool:
    """Whether rows of this width, with so many numbers, are summed whole."""
    return width < _ONE_THREAD or count > width


def _softmax(func: Any, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    found: torch.Tensor
    if not x.is_cpu or not x.dim() or dim % x.dim() == x.dim() - 1:
        found = func(x, dim, half_to_float)
    else:
        found = func(x.transpose(dim, -1).contiguous(), -1, half_to_float).transpose(dim, -1)
    return found
