"""Reads which modules the modules of the package and of its plugins import. Called by the tests of rules."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import fdasync

if TYPE_CHECKING:
    from collections.abc import Container

HOME = Path(fdasync.__file__).parent


def _modules(home: Path) -> dict[str, Path]:
    return {
        ".".join((home.name, *path.relative_to(home).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(home.rglob("*.py"))
    }


_PLUGIN_HOMES = [path.parent for path in sorted((HOME.parent / "plugins").glob("*/src/*/__init__.py"))]
# by name: modules of the core and of fleets, which processes of ours run; those and all plugins'
MODULES = _modules(HOME) | _modules(HOME.parent / "plugins/fdasync-fleet/src/fdasync_fleet")
ALL_MODULES = MODULES | {name: path for home in _PLUGIN_HOMES for name, path in _modules(home).items()}


def within(name: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module is one of `rooms` or stands in one of them."""
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def imports_of(source: str, *, types: bool = False, known: Container[str] = ALL_MODULES) -> dict[str, int]:
    """Modules that a module's source imports, at any depth, and the line; `types`: those for type checkers, too.
    `known`: names of modules, to tell `from room import module` from a name in a room."""
    found: dict[str, int] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" and not types:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found[inner if inner in known else base] = node.lineno
        for child in ast.iter_child_nodes(node):
            # no expression holds an import
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                visit(child)

    visit(ast.parse(source))
    return found
