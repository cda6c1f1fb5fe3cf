"""Operations of Triton's interpreter without the search for what is known: part of `quick_interpreter.py`.

Two values of one type are brought together for each operation, though they agree; a number beside a block becomes a
block of it each time; types of floating point are taken to their bits and put together again; every argument of a
function of the language is looked through for constants, and passes through three functions on its way. None of this
changes a value. `quicken_operations` replaces private names of Triton, and is called once, by
`quick_interpreter.quicken`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

# blocks of numbers that are kept: more are forgotten all at once
_MOST_NUMBERS = 1_000


def quicken_operations(interpreter: Any) -> None:
    """Make the operations of this process's interpreter quicker; not idempotent."""
    core = interpreter.tl.core
    _make_handles_soon(interpreter)
    _agree_soon(interpreter.TritonSemantic, core.tensor)
    _compute_soon(interpreter)
    _unwrap_soon(core)
    interpreter._convert_float = Conversions(interpreter)


def direct(interpreter: Any, patched: Any) -> Any:
    """What the interpreter puts in the place of a function of the language, less what it passes on its way: the
    keywords copied, and the function's own wrapper, which asks only whether it was given semantics. Other values are
    returned as they are."""
    member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if member is None or patched.__code__.co_name != "<lambda>":
        return patched
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    checks = next(one for one in core.builtin.__code__.co_consts if getattr(one, "co_name", "") == "wrapper")
    function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _make_handles_soon(interpreter: Any) -> None:
    """A value's size is compared with its type's once for each of both."""
    handle = interpreter.TensorHandle
    honest = handle.__post_init__
    fits: set[tuple[int, str]] = set()

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        key = (data.itemsize, dtype.name)
        if key not in fits:
            honest(self)
            fits.add(key)

    handle.__init__ = init


def _agree_soon(semantic: Any, tensor: type) -> None:
    """Values of one type are as they are to be; a number beside a value is what it was beside another of its type."""
    honest = semantic.binary_op_type_checking_impl
    stay: dict[tuple[str, bool, bool], bool] = {}
    numbers: dict[tuple[Any, ...], Any] = {}

    def stays(self: Any, type_: Any, arithmetic_check: bool, div_or_mod: bool) -> bool:
        scalar = type_.scalar
        if scalar.is_ptr():
            return False
        return not arithmetic_check or (self.computation_type_impl(scalar, False, scalar, False, div_or_mod) == scalar)

    def agree(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        given = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if type(lhs) is tensor:
            name = lhs.type.name
            if type(rhs) is tensor:
                if name != rhs.type.name:
                    return honest(self, lhs, rhs, *given)
                key = (name, arithmetic_check, div_or_mod)
                if key not in stay:
                    stay[key] = stays(self, lhs.type, arithmetic_check, div_or_mod)
                return (lhs, rhs) if stay[key] else honest(self, lhs, rhs, *given)
            number, left = rhs, False
        elif type(rhs) is tensor:
            name, number, left = rhs.type.name, lhs, True
        else:
            return honest(self, lhs, rhs, *given)
        if type(number) not in (int, float, bool) or number != number:
            return honest(self, lhs, rhs, *given)
        key_ = (name, type(number), number, math.copysign(1.0, number), left, *given)
        made = numbers.get(key_)
        if made is None:
            one, other = honest(self, lhs, rhs, *given)
            value, made = (other, one) if left else (one, other)
            if value is (rhs if left else lhs):
                if len(numbers) >= _MOST_NUMBERS:
                    numbers.clear()
                made.handle.data.flags.writeable = False
                numbers[key_] = made
            return one, other
        return (made, rhs) if left else (lhs, made)

    semantic.binary_op_type_checking_impl = agree


def _compute_soon(interpreter: Any) -> None:
    """Only truth values need more than NumPy's operation; sizes are compared once for each pair of types."""
    builder = interpreter.InterpreterBuilder
    honest = builder.binary_op
    handle, validate = interpreter.TensorHandle, interpreter._validate_np_data_size
    fits: dict[tuple[int, str], bool] = {}

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[[Any, Any], Any]) -> Any:
        one, other = lhs.data, rhs.data
        if one.dtype.kind == "b":
            return honest(self, lhs, rhs, op)
        output, scalar = op(one, other), lhs.dtype.scalar
        key = (output.itemsize, scalar.name)
        if key not in fits:
            fits[key] = validate(output, scalar)
        if not fits[key]:
            output = output.astype(interpreter._get_np_dtype(scalar))
        return handle(output, scalar)

    builder.binary_op = binary_op


def _unwrap_soon(core: Any) -> None:
    """Most arguments are values, and no constants."""
    honest, constant, tensor = core._unwrap_if_constexpr, core.constexpr, core.tensor
    plain = {tensor, int, float, bool, str, type(None)}

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is constant else honest(o)

    core._unwrap_if_constexpr = unwrap


class Conversions:
    """In place of `interpreter._convert_float`: bits of values in another type of floating point, by a table of all
    values of the type where it has no more than 16 bits, and by shifts from float32 to bfloat16. What the interpreter
    does to subnormal numbers it does itself.

    Attributes:
        honest: the interpreter's own.
    """

    def __init__(self, interpreter: Any) -> None:
        self.honest: Callable[[Any, Any, Any, Any], Any] = interpreter._convert_float
        self._to_even = interpreter._ir.ROUNDING_MODE.RTNE
        self._tables: dict[tuple[str, str, bool], Any] = {}

    def __call__(self, input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        rounds = rounding_mode == self._to_even
        width = input_dtype.primitive_bitwidth
        if width <= 16:
            key = (input_dtype.name, output_dtype.name, rounds)
            if key not in self._tables:
                every = np.arange(1 << width, dtype=f"uint{width}")
                self._tables[key] = self.honest(every, input_dtype, output_dtype, rounding_mode)
            return np.take(self._tables[key], input.view(f"uint{width}"))
        if (input_dtype.name, output_dtype.name) == ("fp32", "bf16"):
            bits = input.view(np.uint32)
            magnitude = bits & 0x7FFFFFFF
            if not ((magnitude != 0) & (magnitude < 0x00800000)).any():
                top = bits >> 16
                # as the interpreter rounds: what overflows is or'ed to the exponent
                return ((top & 0xFF80) | ((top & 0x7F) + ((bits >> 15) & 1)) if rounds else top).astype(np.uint16)
        return self.honest(input, input_dtype, output_dtype, rounding_mode)
