"""The quicker interpreter does what Triton's own does, and leaves `triton.language` as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.support.quick_interpreter import _Patches, quicken

interpreter = pytest.importorskip("triton.runtime.interpreter")


@triton.jit
def _twice(value: Any) -> Any:
    return value + value


@triton.jit
def _sums(x_ptr: Any, out_ptr: Any, WIDTH: tl.constexpr) -> None:  # noqa: N803
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * WIDTH + columns)
    total = tl.sum(tl.where(columns * 3 < WIDTH, _twice(x), x.to(tl.float32)), axis=0)
    tl.store(out_ptr + row, total)


def run() -> torch.Tensor:
    x = torch.arange(64, dtype=torch.float32).reshape(4, 16) / 7
    out = torch.empty(4)
    _sums[(4,)](x, out, 16)
    return out


def state() -> dict[tuple[str, str], Any]:
    owners = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor, "dtype": tl.dtype}
    return {(name, one): value for name, owner in owners.items() for one, value in vars(owner).items()}


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> _Patches:
    if not isinstance(_sums, interpreter.InterpretedFunction):
        pytest.skip("kernels are compiled here")
    quicken()
    return interpreter._patch_lang


def test_it_gives_the_same_and_works_out_what_to_change_once(patches: _Patches, monkeypatch: Any) -> None:
    # the interpreter adds names to the modules of device functions when it first meets them
    first = [run(), run()][0]
    before, worked_out = state(), patches.worked_out
    assert torch.equal(run(), first)
    assert patches.worked_out == worked_out
    after = state()
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    # a launch leaves nothing of the interpreter in place
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.core.load)
    monkeypatch.setattr(interpreter, "_patch_lang", patches._honest)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    assert torch.equal(run(), first)


def test_a_launch_that_raises_leaves_nothing_in_place(patches: _Patches) -> None:
    @triton.jit
    def broken(out_ptr: Any) -> None:
        tl.store(out_ptr, _twice(None))

    with pytest.raises(interpreter.InterpreterError):
        broken[(1,)](torch.empty(1))
    assert tl.core.is_builtin(tl.load)
    assert run().isfinite().all()


def test_blocks_are_what_they_were(patches: _Patches) -> None:
    for element in (tl.int32, tl.bfloat16, tl.pointer_type(tl.float32), tl.pointer_type(tl.pointer_type(tl.int8))):
        first, second = (tl.block_type(element, [tl.constexpr(4), 16]) for _ in range(2))
        assert first == second != tl.block_type(element, [16, 4])
        assert (first.numel, [int(side) for side in first.shape]) == (64, [4, 16])
        assert first.name == second.name == str(first)
        assert str(element) in first.name
        assert first.scalar == second.scalar == element
    assert tl.block_type(tl.int32, [16]) != tl.block_type(tl.uint32, [16])
    assert tl.block_type(tl.pointer_type(tl.int32), [16]) != tl.block_type(tl.pointer_type(tl.int32, const=True), [16])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])


def test_only_an_assertion_that_is_left_out_anyhow_is_not_worked_out() -> None:
    assert not interpreter.InterpreterOptions().debug


@triton.jit
def _mixed(x_ptr: Any, out_ptr: Any, WIDTH: tl.constexpr) -> None:  # noqa: N803
    columns = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + columns)
    # one shape and two types; another shape; a number; both scalars
    pairs = x.to(tl.float16) + x
    table = pairs[:, None] * x[None, :] + columns[None, :]
    tl.store(out_ptr + columns, tl.sum(table, axis=0) / (tl.program_id(0) + 3))


def test_values_of_other_types_and_shapes_are_still_brought_together(patches: _Patches) -> None:
    x = torch.arange(8, dtype=torch.float32) / 8
    out = torch.empty(8)
    _mixed[(1,)](x, out, 8)
    assert torch.equal(out, ((x * 2)[:, None] * x + torch.arange(8)).sum(0) / 3)
    with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
        _unequal[(1,)](out)


@triton.jit
def _unequal(out_ptr: Any) -> None:
    tl.store(out_ptr + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 4))


@triton.jit
def _numbers(x_ptr: Any, out_ptr: Any, WIDTH: tl.constexpr) -> None:  # noqa: N803
    columns = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + columns)
    n = columns.to(tl.int32)
    tl.store(out_ptr + columns, x + 0.0)
    tl.store(out_ptr + WIDTH + columns, x + -0.0)
    tl.store(out_ptr + 2 * WIDTH + columns, 7 - n)
    tl.store(out_ptr + 3 * WIDTH + columns, n - 7)
    # halves are divided as singles; a whole number and a truth value beside truth values
    tl.store(out_ptr + 4 * WIDTH + columns, x.to(tl.float16) / 3.0 + x.to(tl.float16) / (x + 1).to(tl.float16))
    tl.store(out_ptr + 5 * WIDTH + columns, ((n > 2) & True).to(tl.float32) + ((n > 2) + 1).to(tl.float32))
    tl.store(out_ptr + 6 * WIDTH + columns, n // 3 + n % 3 + 1.5)


def test_numbers_beside_values_keep_type_sign_and_side(patches: _Patches) -> None:
    x = torch.tensor([-0.0, 0.5, 1.0, 2.0])
    n = torch.arange(4)
    half = x.half()
    # found by the interpreter, and known from then on
    for _ in range(2):
        out = torch.empty(7, 4)
        _numbers[(1,)](x, out, 4)
        assert torch.equal(out[:2], torch.stack([x, x]))
        assert torch.signbit(out[:2, 0]).tolist() == [False, True]
        assert torch.equal(out[2:4], torch.stack([7 - n, n - 7]).float())
        assert torch.equal(out[4], half.float() / 3 + half.float() / (x + 1))
        # a sum of truth values and 1 is a whole number
        assert torch.equal(out[5], (n > 2).float() + (n > 2).int() + 1)
        assert torch.equal(out[6], n // 3 + n % 3 + 1.5)


@triton.jit
def _unsigned(x_ptr: Any, NUMBER: tl.constexpr) -> None:  # noqa: N803
    tl.store(x_ptr, tl.load(x_ptr) + NUMBER)


def test_numbers_that_a_type_has_not_are_refused_beside_it(patches: _Patches) -> None:
    value = torch.full((1,), 3, dtype=torch.uint8)
    _unsigned[(1,)](value, 2)
    assert value.tolist() == [5]
    for number in (-1, 300):
        with pytest.raises(interpreter.InterpreterError, match=r"negative scalar|out of range"):
            _unsigned[(1,)](value, number)
    assert value.tolist() == [5]


@pytest.mark.parametrize("rounding", ["none", "rtne", "rtz"])
def test_every_float_is_converted_as_the_interpreter_converts_it(patches: _Patches, rounding: str) -> None:
    convert: Any = interpreter._convert_float
    modes = interpreter._ir.ROUNDING_MODE
    mode = {"none": None, "rtne": modes.RTNE, "rtz": modes.RTZ}[rounding]
    every = np.arange(1 << 16, dtype=np.uint16)
    for one, other in ((tl.bfloat16, tl.float32), (tl.float16, tl.float32)):
        given = every.reshape(256, 256).T
        assert np.array_equal(convert(given, one, other, mode), convert.honest(given, one, other, mode))
    for kind in (tl.float8e4nv, tl.float8e5):
        given = every[:256].astype(np.uint8)
        assert np.array_equal(convert(given, kind, tl.float16, mode), convert.honest(given, kind, tl.float16, mode))
    # each value of bfloat16 and what lies around the places where it is cut; with and without subnormal numbers
    singles = (every.astype(np.uint32) << 16)[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    for given in (singles, singles[singles & 0x7F800000 > 0], singles[:1, :1]):
        found = convert(given.view(np.float32), tl.float32, tl.bfloat16, mode)
        assert found.dtype == np.uint16
        assert np.array_equal(found, convert.honest(given.view(np.float32), tl.float32, tl.bfloat16, mode))
