"""What the conformance suites say when they fail. Called by the tests of suites."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def tells(message: ast.expr | None) -> bool:
    """It has a value in it that is not known before the test runs."""
    return message is not None and any(isinstance(node, ast.FormattedValue) for node in ast.walk(message))


def silent_assertions(path: Path) -> list[str]:
    """Those of a suite that say nothing of what happened."""
    silent: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert) and not tells(node.msg):
            silent.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func
            if isinstance(name, ast.Name) and name.id == "AssertionError" and not tells(node.exc.args[0]):
                silent.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return silent


def message_of(suite: Any, test: str) -> str:
    """With which a suite's test fails."""
    with pytest.raises(AssertionError) as caught:
        getattr(suite, test)()
    return str(caught.value)
