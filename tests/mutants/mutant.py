"""One mutant: a small change of one source file, kept as text so that it is found again where lines have moved."""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class NotFound(Exception):
    """The text of a mutant is not in its file, or in several places that nothing tells apart."""

    def __init__(self, path: str, places: int) -> None:
        super().__init__(f"{path}: the text is there {places} times" if places else f"{path}: the text is not there")
        self.places = places


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        number: from 1 on, in the order of the draw.
        path: relative to the repository's root.
        line: of the first line of `before` when it was drawn, from 1 on.
        scope: the function or class around it, by its dotted name; "" is the module.
        above, below: the lines around it. They tell apart places of one scope that have the same text.
        before, after: the changed lines, whole; the two need not have as many.
    """

    number: int
    area: str
    operator: str
    path: str
    line: int
    scope: str
    above: str
    below: str
    before: str
    after: str

    def find(self, source: str) -> int:
        """The line, from 1 on, at which `before` begins in `source`. Raises: NotFound."""
        lines, before = source.split("\n"), self.before.split("\n")
        places = [
            line
            for line in range(1, len(lines) - len(before) + 2)
            if lines[line - 1 : line - 1 + len(before)] == before and scope_at(source, line) == self.scope
        ]
        if len(places) > 1:
            around = self.above, self.below
            places = [line for line in places if _around(lines, line, len(before)) == around]
        if len(places) != 1:
            raise NotFound(self.path, len(places))
        return places[0]

    def changed(self, source: str) -> str:
        """The source with the change made. Raises: NotFound."""
        lines, first = source.split("\n"), self.find(source) - 1
        lines[first : first + len(self.before.split("\n"))] = self.after.split("\n")
        return "\n".join(lines)

    def apply(self, root: Path) -> None:
        """Change the file below `root`. Raises: NotFound, OSError."""
        path = root / self.path
        path.write_text(self.changed(path.read_text()))


def compiles(source: str) -> bool:
    """Whether Python takes it, and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "mutant", "exec")
        except (SyntaxError, ValueError, Warning):
            return False
    return True


def around(source: str, line: int, count: int) -> tuple[str, str]:
    """The line above `count` lines from `line` on, and the line below them; "" beyond the file."""
    return _around(source.split("\n"), line, count)


def scope_at(source: str, line: int) -> str:
    """The dotted name of the innermost function or class around a line; "" is the module."""
    names: list[str] = []
    node: ast.AST = _tree(source)
    while True:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and child.lineno <= line <= (child.end_lineno or 0):
                break
            if isinstance(child, ast.ExceptHandler | ast.match_case) and _spans(child, line):
                break
        else:
            return ".".join(names)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(child.name)
        node = child


def statement_lines(source: str, line: int) -> range:
    """The lines of the innermost statement around a line: of one with a body those of its head alone."""
    found: ast.stmt | None = None
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            found = node  # the walk goes from the outer to the inner ones
    if found is None:
        return range(line, line + 1)
    body = getattr(found, "body", None)
    end = body[0].lineno - 1 if body else found.end_lineno or found.lineno
    return range(found.lineno, max(end, line) + 1)


def function_lines(source: str, line: int) -> range:
    """The lines of the body of the innermost function around a line; none where there is no function."""
    found: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            found = node  # as above
    return range(found.body[0].lineno, (found.end_lineno or 0) + 1) if found else range(0)


def _spans(node: ast.ExceptHandler | ast.match_case, line: int) -> bool:
    return node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)


def _around(lines: list[str], line: int, count: int) -> tuple[str, str]:
    first, end = line - 1, line - 1 + count
    return lines[first - 1] if first else "", lines[end] if end < len(lines) else ""


@lru_cache(maxsize=8)
def _tree(source: str) -> ast.Module:
    return ast.parse(source)
