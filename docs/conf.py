"""Settings of Sphinx, for `make docs`: the pages of this repository, and a reference of its public names.

The folder of the sources is the repository's root: pages link to each other and to files as they do in a checkout. No
network is needed, and a warning is an error, such as a link that leads nowhere.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fdasync.result  # noqa: E402
from tests.support.public import PACKAGES  # noqa: E402 - it is found by the line before

project = "fdasync"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**.md", "plugins/*/*.md"]
root_doc = "docs/index"
html_theme = "furo"
myst_heading_anchors = 6
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

# the signature of a struct is made of its annotations; those of types alone are not imported where it is declared
vars(fdasync.result).update(np=np, NDArray=NDArray)

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
# outside of code they stand for themselves
_MARKS = re.compile(r"\||(?<![*\\])\*(?![*\s])")
# a paragraph, and indented lines behind an empty one
_EXAMPLE = re.compile(r"^([^\s:.].*)\n\n(?= {4})", re.MULTILINE)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("source-read", _list_packages)


def _as_rst(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are written as pages are: `code` with letters behind it, bars, examples that are indented."""
    parts = _CODE.split(_EXAMPLE.sub(r"\1\n\n::\n\n", "\n".join(lines)))
    # every second part is code
    parts[1::2] = [f"``{parts[at]}``" + r"\ " * parts[at + 1][:1].isalnum() for at in range(1, len(parts), 2)]
    parts[::2] = [_MARKS.sub(r"\\\g<0>", part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def _list_packages(_app: Any, name: str, source: list[str]) -> None:
    """`docs/reference/api.md` has the packages whose names are public (`tests/public.txt`), and the errors."""
    if name == "docs/reference/api":
        seen: set[int] = set()
        listed = ""
        for package in PACKAGES:
            module = importlib.import_module(package)
            told = []
            for one in module.__all__:
                try:
                    found = getattr(module, one)
                except ModuleNotFoundError:
                    # of an extra that is not installed
                    continue
                # what is imported when it is first used is looked for among what is there
                vars(module).setdefault(one, found)
                # what two packages have is told once
                told += [one] * (id(found) not in seen)
                seen.add(id(found))
            listed += f".. automodule:: {package}\n   :members: {', '.join(told)}\n\n"
        listed += ".. automodule:: fdasync.errors\n   :members:\n"
        source[0] += f"\n```{{eval-rst}}\n{listed}\n```\n"
