"""Runs the library's own code with fixed numerics: takes the operations whose bits depend on the batch.

A dispatch mode stands below autograd: it replaces values and leaves gradients to torch, and it sees every operation,
whatever module or function called it. So one path serves all families, rollouts and trainers. Products, and what
`vectors.py` has, are computed in one order; what cannot be is refused. All other operations work element by element or
row by row; at start the self-check looks whether a model's bits are fixed. Knows no modules. Entered by the step
models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in BY_PLACE or func in IN_PLACE:
            return _by_place(func, *args, **kwargs)
        if func in _REFUSED or (func in _ATOMIC and args[0].is_cuda and args[0].is_floating_point()):
            raise RunnerError(f"numerics='fixed': {func.name()} has results that depend on the batch")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # in inference mode whole operations come here, not yet their parts
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


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
