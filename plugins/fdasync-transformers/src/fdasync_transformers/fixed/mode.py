"""Runs the library's own code with fixed numerics: takes the operations whose bits depend on the batch.

A dispatch mode stands below autograd: it replaces values and leaves gradients to torch, and it sees every operation,
whatever module or function called it. So one path serves all families, rollouts and trainers. Taken are products
(`products.py`), and on a CPU all pointwise operations that round more than once (`vectors.py`), reductions and softmax
(`reductions.py`), in each form: with a result, in place, into `out`. On a GPU, sums and means of rows are taken.
Above autograd stands a function mode for `linear`, which torch makes of other parts, with other roundings, by the
layout of its input; a trainer does without, where modules that call it are replaced (`trainer_pass.py`): it is
given each attribute of each tensor too.

Refused are operations whose order of sums is known to depend on the batch. All others are assumed to move numbers, to
select them, or to walk each row by itself (norms of layers in one operation, cumulated sums, sums into places on a
CPU, sorting); at start the self-check looks whether a model's bits are fixed. Knows no modules. Entered by the step
models, and by trainers through `trainer_pass.PassMode`.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fdasync.errors import RunnerError
from fdasync_transformers.fixed.products import product, products
from fdasync_transformers.fixed.reductions import reduction
from fdasync_transformers.fixed.vectors import elementwise, gated

if TYPE_CHECKING:
    from collections.abc import Callable

_ATEN = torch.ops.aten


class FixedNumerics(TorchDispatchMode):
    """See the module. May be entered again while it is entered; each thread enters it for itself.

    Raises RunnerError for an operation whose result depends on the batch and that has no fixed form: attention that
    does not go through the library's interface, convolutions, and on GPUs sums by atomics.
    """

    def __init__(self, *, linears: bool = True, known: dict[Any, Callable[..., Any] | None] | None = None) -> None:
        """`linears`: False where all of the model's go through `linear_of_rows` already. `known`: what computes the
        operations that were seen, which modes may have in common."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._known = {} if known is None else known
        # by the id of an operation, as it is first seen: what computes it
        self._ways: dict[int, Callable[..., Any]] = {}
        self._linears = _Linears() if linears else nullcontext()

    @staticmethod
    def linear_past_modes(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What `linear` of rows [R, K] by a weight [N, K] is within, for kernels that are called past all modes."""
        return product(rows, weight.t(), bias)

    # without types, as what they stand for
    def __enter__(self):  # type: ignore[no-untyped-def]  # torch has no types here
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._linears.__enter__()
        return self

    def __exit__(self, *error):  # type: ignore[no-untyped-def]  # torch has no types here
        self._linears.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method below in two functions that keep compilation out, in each operation; compiled
        # models are refused, and a function that is compiled runs eagerly within modes
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # operations live as long as torch, and their own hash is a function in Python
        way = self._ways.get(id(func))
        if way is None:
            way = self._ways[id(func)] = self._way(func)
        return way(*args, **kwargs) if kwargs else way(*args)

    def _way(self, func: Any) -> Callable[..., Any]:
        """What computes an operation."""
        if func not in self._known:
            self._known[func] = _way(func)
        return self._known[func] or partial(self._by_parts, func)

    def _by_parts(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """In inference mode, operations that are made of others come here before their parts do."""
        # the dispatch mode alone: a function mode would be given each of these operations once more
        TorchDispatchMode.__enter__(self)
        try:
            with torch._C.DisableTorchFunction():
                result = func.decompose(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)
        return func(*args, **kwargs) if result is NotImplemented else result


class _Linears(TorchFunctionMode):
    """Makes every `linear` one of rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is linear:
            return linear_of_rows(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def linear_of_rows(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's `linear` of contiguous rows [R, K]: torch computes these by one operation with one rounding."""
    if weight.dim() != 2 or input.dim() == 2 or not input.dim():
        return linear(input, weight, bias)
    rows = linear(input.reshape(-1, input.shape[-1]), weight, bias)
    # no view for autograd, as torch's own: hooks of a module (FSDP2's) refuse to be given views
    # torch has no types here
    return torch.ops.aten._unsafe_view(rows, [*input.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]


def _way(func: Any) -> Callable[..., Any] | None:
    """What computes an operation; None: its parts do."""
    own: Callable[..., Any] = func
    if func.namespace != "aten":
        return own
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return None
    plain = _plain(func)
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_REFUSED):
        return partial(_refuse, func)
    if name in _ATOMIC:
        return partial(_in_order, func)
    write = _writer(func, plain)
    way = elementwise(func, plain, write)
    if way is not None and name.startswith("lerp"):
        way = partial(_of_reals, func, way)
    if way is None and plain is not None:
        way = _HANDLERS.get(plain) or reduction(plain)
        if way is not None and plain is not func:
            way = partial(write, way)
    if way is None:
        # of a product or a reduction: with a dtype of its own
        return partial(_refuse, func) if name.removesuffix("_") in _TAKEN else own
    return way


def _plain(func: Any) -> Any:
    """The operation with the same arguments that returns a new tensor; None: there is none."""
    schema = func._schema
    if not schema.is_mutable:
        return func
    taken = [(one.name, str(one.type)) for one in schema.arguments if not one.is_out]
    packet = getattr(_ATEN, schema.name.removeprefix("aten::").removesuffix("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        other = getattr(packet, overload)
        if not other._schema.is_mutable and [(one.name, str(one.type)) for one in other._schema.arguments] == taken:
            return other
    return None


def _writer(func: Any, plain: Any) -> Callable[..., Any]:
    """What calls its first argument with the others, as `func` is called, and writes the result where `func` does."""
    if plain is func:
        return lambda way, *args, **kwargs: way(*args, **kwargs)
    outs = [one.name for one in func._schema.arguments if one.is_out]
    return partial(_refuse, func) if plain is None or len(outs) > 1 else partial(_written, func, *outs or [None])


def _written(func: Any, out: str | None, way: Callable[..., Any], /, *args: Any, **kwargs: Any) -> torch.Tensor:
    into: torch.Tensor = args[0] if out is None else kwargs.pop(out)
    found = way(*args, **kwargs)
    if not torch.can_cast(found.dtype, into.dtype):
        raise RuntimeError(f"result type {found.dtype} can't be cast to {into.dtype}, of what {func.name()} writes to")
    if out is not None and into.shape != found.shape:
        into.resize_(found.shape)
    return into.copy_(found)


def _refuse(func: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise RunnerError(f"numerics='fixed': {func.name()} has results that depend on the batch")


def _of_reals(func: Any, way: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse complex numbers: lanes of a vector differ for them."""
    return _refuse(func) if args[0].is_complex() else way(*args, **kwargs)


def _in_order(func: Any, into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Sums into places: in order on a CPU, by atomics on a GPU."""
    return _refuse(func) if into.is_cuda and into.is_floating_point() else func(into, *args, **kwargs)


def _mv(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return product(right[None], left.t())[0]


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return product(left[None], right[:, None])[0, 0]


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return product(left, right, bias)
    return bias * beta + product(left, right) * alpha


def _addmv(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return bias * beta + _mv(left, right) * alpha


def _baddbmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return bias * beta + products(left, right) * alpha


def _mean(
    x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not _of_rows(x, dim):
        return _mean_on_a_cpu(x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]  # torch has no types here
    from fdasync_kernels.layer.sums import row_mean

    return row_mean(x, keepdim=keepdim, dtype=dtype)


def _sum(
    x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not _of_rows(x, dim):
        return _sum_on_a_cpu(x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]  # torch has no types here
    from fdasync_kernels.layer.sums import row_sum

    return row_sum(x, keepdim=keepdim, dtype=dtype)


def _of_rows(x: torch.Tensor, dim: list[int] | None) -> bool:
    """Whether it sums each row on a GPU, where torch chooses by the number of rows how."""
    return x.is_cuda and x.is_floating_point() and dim in ([-1], [x.dim() - 1])


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return gated(x, dim) if x.is_cpu else _ATEN.glu.default(x, dim)


_mean_on_a_cpu: Any = reduction(_ATEN.mean.dim)
_sum_on_a_cpu: Any = reduction(_ATEN.sum.dim_IntList)

# by operations that return new tensors
_HANDLERS: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.mm.default: lambda left, right: product(left, right),
    _ATEN.mv.default: _mv,
    _ATEN.dot.default: _dot,
    _ATEN.addmm.default: _addmm,
    _ATEN.addmv.default: _addmv,
    _ATEN.bmm.default: products,
    _ATEN.baddbmm.default: _baddbmm,
    _ATEN.glu.default: _glu,
    _ATEN.mean.dim: _mean,
    _ATEN.sum.dim_IntList: _sum,
}
# other forms of these are refused
_TAKEN = frozenset({
    "mm", "mv", "dot", "addmm", "addmv", "bmm", "baddbmm", "glu", "_softmax", "_log_softmax", "linalg_vector_norm",
    "logsumexp", "mean", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
})  # fmt: skip
# by the beginnings of names
_REFUSED = (
    "_convolution", "convolution", "conv_", "mkldnn_", "_mkldnn", "_slow_conv", "_thnn", "miopen_", "cudnn_",
    "_scaled_dot_product", "_flash_attention", "_efficient_attention", "_grouped_mm", "_scaled_", "_int_mm",
    "_addmm_activation", "addbmm", "addr", "vdot", "_trilinear", "_cdist", "_euclidean_dist", "_pdist", "linear",
    "_fft", "fft_", "native_group_norm", "native_batch_norm", "_native_batch_norm", "_batch_norm",
    "avg_pool", "_adaptive_avg", "adaptive_avg", "upsample_", "_embedding_bag", "renorm",
)  # fmt: skip
_ATOMIC = frozenset({
    "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "_index_put_impl_",
})  # fmt: skip
