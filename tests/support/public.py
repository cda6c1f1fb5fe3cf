"""The public surface: what packages export, and what the pages import.

python -m tests.support.public > tests/public.txt
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "fdasync", "fdasync.cache.store", "fdasync.drafting", "fdasync.testing", "fdasync_fleet.testing", "fdasync_http",
    "fdasync_mooncake", "fdasync_ray", "fdasync_trainer", "fdasync_trainer.rows", "fdasync_transformers",
)  # fmt: skip


def surface() -> list[str]:
    """Names with their modules, sorted."""
    found = {f"{package}.{name}" for package in PACKAGES for name in _exported(package)}
    errors = importlib.import_module("fdasync.errors")
    found |= {f"fdasync.errors.{name}" for name, one in vars(errors).items() if inspect.isclass(one) and _is_error(one)}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            found |= _imported(textwrap.dedent(block))
    return sorted(found)


def _exported(package: str) -> list[str]:
    names: list[str] = importlib.import_module(package).__all__
    return names


def _is_error(one: type) -> bool:
    return issubclass(one, Exception) and one.__module__ == "fdasync.errors" and not one.__name__.startswith("_")


def _imported(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        # a part of a program, as a page shows it
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fdasync"):
            found |= {f"{node.module}.{one.name}" for one in node.names}
    return found


if __name__ == "__main__":
    print("\n".join(surface()))
