"""Runs the library's own code with fixed numerics: takes the operations whose bits depend on the batch.

A dispatch mode stands below autograd: it replaces values and leaves gradients to torch, and it sees every operation,
whatever module or function called it. So one path serves all families, rollouts and trainers. Products, and what
`vectors.py` has, are computed in one order; what cannot be is refused. All other operations work element by element or
row by row; at start the self-check looks whether a model's bits are fixed. Knows no modules. Entered by the step
models.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fdasync.errors import RunnerError
from fdasync_transformers.fixed.products import product, products
from fdasync_transformers.fixed.vectors import BY_PLACE, IN_PLACE, in_vectors

if TYPE_CHECKING:
    from collections.abc import Callable

_ATEN = torch.ops.aten


class FixedNumerics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module. May be entered again while it is entered; each thread enters it for itself.

    Raises RunnerError for an operation whose result depends on the batch and that has no fixed form: attention that
    does not go through the library's interface, convolutions, and on GPUs sums by atomics.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by operation, as it is first seen: what computes it
        self._ways: dict[Any, Callable[..., Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        way = self._ways.get(func)
        if way is None:
            way = self._ways[func] = self._way(func)
        return way(*args, **kwargs) if kwargs else way(*args)

    def _way(self, func: Any) -> Callable[..., Any]:
        if func in _HANDLERS:
            return _HANDLERS[func]
        if func in BY_PLACE or func in IN_PLACE:
            return partial(_by_place, func)
        if func in _REFUSED:
            return partial(_refuse, func)
        if func in _ATOMIC:
            return partial(_in_order, func)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return partial(self._by_parts, func)
        own: Callable[..., Any] = func
        return own

    def _by_parts(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """In inference mode, operations that are made of others come here before their parts do."""
        with self:
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _refuse(func: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise RunnerError(f"numerics='fixed': {func.name()} has results that depend on the batch")


def _in_order(func: Any, into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Sums into places: in order on a CPU, by atomics on a GPU."""
    return _refuse(func) if into.is_cuda and into.is_floating_point() else func(into, *args, **kwargs)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return product(left, right)


def _mv(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return product(right[None], left.t())[0]


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return product(left, right, bias)
    return bias * beta + product(left, right) * alpha


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return products(left, right)


def _baddbmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return bias * beta + products(left, right) * alpha


def _bmm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(products(left, right))


def _mm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(product(left, right))


def _by_place(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    plain = IN_PLACE.get(func)
    if not x.is_cpu or not x.is_floating_point():
        result: torch.Tensor = func(x, *args, **kwargs)
        return result
    if plain is None:
        return in_vectors(func, x, *args, **kwargs)
    return x.copy_(in_vectors(plain, x, *args, **kwargs))


_HANDLERS: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.mm.default: _mm,
    _ATEN.mm.out: _mm_out,
    _ATEN.mv.default: _mv,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.bmm.out: _bmm_out,
    _ATEN.baddbmm.default: _baddbmm,
}
_REFUSED = {
    _ATEN.convolution.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}
_ATOMIC = {
    _ATEN.index_add.default,
    _ATEN.index_add_.default,
    _ATEN.scatter_add.default,
    _ATEN.scatter_add_.default,
    _ATEN.index_put_.default,
}
