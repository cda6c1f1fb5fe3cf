"""The quicker interpreter does what Triton's own does, and leaves `triton.language` as it was."""

from __future__ import annotations

from typing import Any

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
