"""Kernels that may be launched early wait for their inputs in every program, read from their source."""

from __future__ import annotations

import ast
from pathlib import Path

import fdasync_kernels
import pytest

_FOLDER = Path(fdasync_kernels.__file__).parent
_WAIT = "wait_for_inputs"


def kernels_of(source: str) -> list[ast.FunctionDef]:
    """Functions of a module that imports the wait, which are told whether kernels overlap."""
    module = ast.parse(source)
    imported = {name.name for node in module.body if isinstance(node, ast.ImportFrom) for name in node.names}
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if _WAIT in imported and "OVERLAP" in {each.arg for each in f.args.args}]


def waits(kernel: ast.FunctionDef) -> bool:
    """Whether each program waits: at the outermost level, with nothing before it that could return."""
    for statement in kernel.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == _WAIT:
            return isinstance(call.args[0], ast.Name) and call.args[0].id == "OVERLAP"
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return False
    return False


FOUND = {
    f"{path.relative_to(_FOLDER)}:{kernel.name}": kernel
    for path in sorted(_FOLDER.rglob("*.py"))
    for kernel in kernels_of(path.read_text())
}


@pytest.mark.parametrize("name", FOUND)
def test_every_program_waits(name: str) -> None:
    assert waits(FOUND[name]), f"a program of {name} can end before the kernels before it have ended"


@pytest.mark.parametrize(
    "body",
    ["pass", "if row < 0:\n  return\n wait_for_inputs(OVERLAP)", "if row < 0:\n  wait_for_inputs(OVERLAP)"],
    ids=["never", "behind a return", "in some programs"],
)
def test_others_are_found(body: str) -> None:
    source = f"from fdasync_kernels.overlap import wait_for_inputs\ndef kernel(row, OVERLAP):\n {body}\n"
    (kernel,) = kernels_of(source)
    assert not waits(kernel)
