"""Refuses imports of the packages that `FDASYNC_REFUSED` names: a process finds them as if they were not installed.

Python imports it at its start where this folder is in `PYTHONPATH`. Knows no package. Used by `tests/test_alone.py`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_REFUSED = {name for name in os.environ.get("FDASYNC_REFUSED", "").split(",") if name}


class _Refusing:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in _REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}: refused", name=name)


def _find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    """Who asks whether a package is there learns that it is not."""
    return None if name.partition(".")[0] in _REFUSED else _found(name, package)


if _REFUSED:
    sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    _found, importlib.util.find_spec = importlib.util.find_spec, _find_spec
