"""Runs one command of a package of commands by its name, or lists them.

It imports the command's module only when it runs it, so that a list needs neither torch nor a GPU. `benchmarks` and
`tests.nightly` use it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.arguments import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run(package: str, modules: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Call `main()` of the module that a command's name stands for, which reads the other arguments; then exit.

    The exit status is what `main` returns, 0 for None; 130 after Ctrl-C, 2 for a name that is not a command's.
    """
    name, *others = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(listing(package, modules))
        sys.exit(0)
    if name not in modules:
        sys.argv[0] = f"python -m {package}"
        refuse(f"{name!r} is no command; there are {', '.join(modules)}")
    sys.argv = [f"python -m {package} {name}", *others]
    try:
        sys.exit(importlib.import_module(modules[name]).main())
    except KeyboardInterrupt:
        sys.exit(130)


def listing(package: str, modules: Mapping[str, str]) -> str:
    """How to call a command, and of each its name and the first sentence of its module."""
    wide = max(map(len, modules))
    rows = [f"  {name:{wide}}  {_first_sentence(module)}" for name, module in modules.items()]
    return "\n".join([f"usage: python -m {package} NAME [--help] ...", "", *rows])


def _first_sentence(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())
