"""Triton's interpreter without its idle work: kernels give the same values in less than half of the time.

What costs most of an interpreted kernel changes nothing. Each launch, and each call of a device function within one,
lists all of `triton.language` to put the interpreter's functions in place; what is put there is the same each time.
Each sum and product of 32-bit integers is computed a second time in 64 bits, for an assertion that the interpreter's
own options (`debug=False`) leave out. Types of blocks, the shapes of their tensors and their NumPy types are worked out
for each value anew; and so is, for the two values of each operation, that they have one type and one shape already.

`conftest.py` calls `quicken` once, where kernels are interpreted. It replaces private names of Triton:
`test_quick_interpreter.py` of the kernels fails if they mean something else.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tests.support.quick_operations import direct, quicken_operations

if TYPE_CHECKING:
    from collections.abc import Callable

Change = tuple[Any, str, Any]


def quicken() -> None:
    """Make the interpreter of this process quicker; idempotent."""
    from triton.runtime import interpreter

    if isinstance(interpreter._patch_lang, _Patches):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Patches(interpreter)
    interpreter._get_np_dtype = _Types(interpreter._get_np_dtype)
    _remember_blocks(interpreter.tl.core)
    _pass_what_agrees(interpreter.TritonSemantic, interpreter.tl.core.tensor)
    quicken_operations(interpreter)


class _Patches:
    """In place of `interpreter._patch_lang`: what it changes is worked out once for each set of language modules that a
    kernel sees, and not again while it is in place. What a device function adds is undone at the end of the launch.

    Attributes:
        worked_out: how many times changes were worked out.
    """

    def __init__(self, interpreter: Any) -> None:
        self.worked_out = 0
        self._scope: type = interpreter._LangPatchScope
        self._nothing = self._scope()
        self._honest: Callable[[Any], Any] = interpreter._patch_lang
        self._interpreter = interpreter
        self._languages = (interpreter.tl, interpreter.tl.core)
        # by what was in place, and what the function sees
        self._changes: dict[tuple[frozenset[int], frozenset[int]], list[Change]] = {}
        # of the launch that runs, and what is in place
        self._launch: Any = None
        self._present: frozenset[int] = frozenset()

    def __call__(self, fn: Any) -> Any:
        within = self._launch is not None and self._launch._changes
        if within and len(self._present) == len(self._languages):
            return self._nothing
        seen = frozenset(
            number
            for number, language in enumerate(self._languages)
            if any(value is language for value in fn.__globals__.values())
        )
        if within:
            if not seen <= self._present:
                self._put(self._launch, fn, seen)
        else:
            # nothing is in place: this begins a launch, which ends with `restore`
            self._launch, self._present = self._scope(), frozenset()
            self._put(self._launch, fn, seen)
            return self._launch
        return self._nothing

    def _put(self, scope: Any, fn: Any, seen: frozenset[int]) -> None:
        key = self._present, seen
        self._present |= seen
        changes = self._changes.get(key)
        if changes is None:
            made = self._honest(fn)._changes
            scope._changes += made
            self._changes[key] = [
                (owner, name, direct(self._interpreter, getattr(owner, name))) for owner, name, _ in made
            ]
            self.worked_out += 1
            return
        for owner, name, value in changes:
            scope.set_attr(owner, name, value)


class _Types(dict[Any, Any]):
    """In place of `interpreter._get_np_dtype`: the NumPy type of each of Triton's that was asked for, by its name."""

    def __init__(self, honest: Callable[[Any], Any]) -> None:
        self._honest = honest

    def __call__(self, type_: Any) -> Any:
        found = self.get(type_.name)
        if found is None:
            found = self[type_.name] = self._honest(type_)
        return found


def _remember_blocks(core: Any) -> None:
    """Blocks of the same type and shape share what is worked out of them; it is never written to afterwards."""
    honest_block, honest_tensor = core.block_type.__init__, core.tensor.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    scalar = core.tensor.__new__(core.tensor)
    honest_tensor(scalar, None, core.int32)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is core.dtype:
            of = element_ty.name
        elif type(element_ty) is core.pointer_type and type(element_ty.element_ty) is core.dtype:
            of = (element_ty.name, element_ty.address_space)
        else:
            honest_block(self, element_ty, shape)
            return
        key = (of, *[side.value if type(side) is core.constexpr else side for side in shape])
        if key not in known:
            honest_block(self, element_ty, shape)
            its = core.tensor.__new__(core.tensor)
            honest_tensor(its, None, self)
            known[key] = {**vars(self), "of_tensors": (its.shape, its.numel)}
        vars(self).update(known[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.is_block():
            if "of_tensors" not in vars(type):
                honest_tensor(self, handle, type)
                return
            self.shape, self.numel = type.of_tensors
        else:
            self.shape, self.numel = scalar.shape, scalar.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _pass_what_agrees(semantic: Any, tensor: type) -> None:
    """Two values of one shape are not brought to one, a value of the type asked for is not cast, and the type in which
    two types are computed is worked out once."""
    honest_broadcast, honest_type = semantic.broadcast_impl_value, semantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block():
            if other.is_block() and list(one.shape) == list(other.shape):
                return lhs, rhs
        elif not other.is_block():
            return lhs, rhs
        both: tuple[Any, Any] = honest_broadcast(self, lhs, rhs)
        return both

    def computed_in(self: Any, one: Any, one_scalar: bool, other: Any, other_scalar: bool, div_or_mod: bool) -> Any:
        key = (one.name, one_scalar, other.name, other_scalar, div_or_mod)
        if key not in known:
            known[key] = honest_type(self, one, one_scalar, other, other_scalar, div_or_mod)
        return known[key]

    semantic.broadcast_impl_value, semantic.computation_type_impl = broadcast, computed_in
    if hasattr(semantic, "_cast_to_computation_type"):
        honest_cast = semantic._cast_to_computation_type

        def cast(self: Any, value: Any, dtype: Any) -> Any:
            return value if type(value) is tensor and value.dtype is dtype else honest_cast(self, value, dtype)

        semantic._cast_to_computation_type = cast
