"""Kernels alone have no types: mypy asks for none in this package, since Triton reads annotations of a kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import fdasync_kernels
import pytest

SOURCES = sorted(Path(fdasync_kernels.__file__).parent.rglob("*.py"))


def untyped(text: str) -> list[str]:
    """Functions that are no kernels and lack the type of a parameter, or of what they return."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        if any(ast.unparse(one) in {"triton.jit", "gluon.jit"} for one in decorators):
            continue
        named = node.args
        given = [*named.posonlyargs, *named.args, *named.kwonlyargs, named.vararg, named.kwarg]
        bare = [one for one in given if one is not None and one.annotation is None and one.arg not in {"self", "cls"}]
        if bare or node.returns is None:
            found.append(node.name)
    return found


def test_all_functions_but_kernels_have_types():
    assert len(SOURCES) > 50
    assert {path.name: names for path in SOURCES if (names := untyped(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(a: int) -> int: ...", []),
        ("def f(a) -> int: ...", ["f"]),
        ("def f(*, a: int): ...", ["f"]),
        ("class C:\n    def f(self, *rest) -> None: ...", ["f"]),
        ("@triton.jit\ndef f(a, b): ...", []),
        ("@gluon.jit(noinline=True)\ndef f(a, b): ...", []),
        ("@functools.cache\ndef f(a, b): ...", ["f"]),
    ],
)
def test_what_lacks_a_type_is_found(text: str, names: list[str]):
    assert untyped(text) == names
