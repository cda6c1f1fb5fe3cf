"""Refuses imports of the packages that `FDASYNC_REFUSED` names: a process finds them as if they were not installed.

Python imports it at its start where this folder is in `PYTHONPATH`. Knows no package. Used by `tests/test_alone.py`.
"""

from __future__ import annotations

import os
import sys

_REFUSED = {name for name in os.environ.get("FDASYNC_REFUSED", "").split(",") if name}


class _Refusing:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in _REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}: refused", name=name)


if _REFUSED:
    sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
