"""Functions of elements whose bits, on a CPU, depend on where an element stands in its tensor, and on strides.

torch computes most of a tensor in whole vectors, and the rest (of each thread's part, of strided tensors all) one by
one, by other functions or with other contractions: an element's bits change with the number of tokens before it. Here
every element of every pointwise operation goes through whole vectors, but for operations that round once at most, whose
result IEEE 754 gives. It is assumed that a lane of a vector does not matter; tests look for it over all of torch's
pointwise operations. Knows no modules. Called by `mode.py`.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: a multiple of the vectors that torch computes at once, of every width of registers and dtype
_VECTOR = 256
# torch gives no more than this to one thread whole
_MOST = 1 << 15

# these select, compare or copy: nothing is rounded
_UNROUNDED = frozenset({
    "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil",
    "clamp", "clamp_max", "clamp_min", "clone", "copysign", "eq", "equal", "floor", "fmax", "fmin", "ge", "gt",
    "ilshift", "irshift", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "ixor", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lshift", "lt", "masked_fill", "maximum", "minimum", "ne", "relu",
    "rshift", "signbit", "threshold", "trunc", "where", "xor",
})  # fmt: skip
# these round once, of real numbers and without further arguments (alpha, a mode of rounding, decimals)
_ROUNDED_ONCE = frozenset({
    "abs", "add", "div", "mul", "neg", "reciprocal", "round", "rsub", "sign", "sqrt", "sub",
})  # fmt: skip
# elementwise too, without torch's tag
_UNTAGGED = frozenset({
    "prelu_kernel", "hardswish", "log_sigmoid_forward", "polar",
})  # fmt: skip


def elementwise(func: Any, plain: Any, write: Callable[..., Any]) -> Callable[..., Any] | None:
    """What computes an operation of elements, so that places do not matter; None: it is left as it is.

    Args:
        func: the operation.
        plain: the same, which returns a new tensor; may be itself, or None where there is none.
        write: calls its first argument, which is like `plain`, with the arguments of `func`, and writes what it returns
            where `func` does.
    """
    name = func._schema.name.removeprefix("aten::").strip("_")
    # not all forms that write have the tag
    tags = (*func.tags, *(() if plain is None else plain.tags))
    if name in _UNROUNDED or not (torch.Tag.pointwise in tags or name in _UNTAGGED):
        return None
    vectors = partial(_on_a_cpu, func, partial(write, partial(in_vectors, plain)))
    if name in _ROUNDED_ONCE:
        return partial(_arithmetic, func, vectors)
    if name == "pow":
        return partial(_power, func, vectors)
    return vectors


def _arithmetic(func: Any, vectors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) > 2 or any(isinstance(one, torch.Tensor) and one.is_complex() for one in args):
        return vectors(*args, **kwargs)
    return func(*args)


def _power(func: Any, vectors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # a square is one product: norms ask for it
    if not kwargs and type(args[1]) in (int, float) and args[1] == 2:
        return func(*args)
    return vectors(*args, **kwargs)


def _on_a_cpu(func: Any, vectors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for one in args:
        if isinstance(one, torch.Tensor):
            return vectors(*args, **kwargs) if one.is_cpu else func(*args, **kwargs)
    return func(*args, **kwargs)


def in_vectors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of each element of tensors on a CPU that are broadcast together, every element computed within whole
    vectors: a new tensor, or several."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    shape = tensors[0].shape
    if len(tensors) > 1:
        shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    count = prod(shape)
    if not count:
        return function(*args, **kwargs)
    # of several, those without dimensions stay so: they weigh less in the choice of the result's dtype
    flat = [_whole(one, shape) if isinstance(one, torch.Tensor) and (one.dim() or not shape) else one for one in args]
    taken = count + -count % _VECTOR
    if taken <= _MOST:
        return _shaped(function(*flat, **kwargs), shape, count)
    parts = [
        function(*(one[first : first + _MOST] if _is_flat(one) else one for one in flat), **kwargs)
        for first in range(0, taken, _MOST)
    ]
    if isinstance(parts[0], torch.Tensor):
        return _shaped(torch.cat(parts), shape, count)
    return tuple(_shaped(torch.cat(column), shape, count) for column in zip(*parts, strict=True))


def gated(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`glu` of a tensor on a CPU, in float32 or wider, rounded once."""
    value, gate = x.chunk(2, dim)
    wide = torch.promote_types(x.dtype, torch.float32)
    weights: torch.Tensor = in_vectors(torch.sigmoid, gate.to(wide))
    return (value.to(wide) * weights).to(x.dtype)


def _whole(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Its elements one behind the other, in whole vectors."""
    flat = (tensor if tensor.shape == shape else tensor.expand(shape)).reshape(-1)
    missing = -len(flat) % _VECTOR
    return torch.cat((flat, flat.new_ones(missing))) if missing else flat.contiguous()


def _is_flat(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() == 1


def _shaped(found: Any, shape: torch.Size, count: int) -> Any:
    if isinstance(found, torch.Tensor):
        return found[:count].view(shape)
    return tuple(one[:count].view(shape) for one in found)
