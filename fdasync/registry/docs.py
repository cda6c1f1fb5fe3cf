"""What the docstring of a struct says of each field: the words of `--help`, and of metrics.

Knows no struct. Called by `cli/common/fields.py` and `telemetry/stats_metrics.py`.
"""

from __future__ import annotations

import inspect
import re

_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): ")


def docs_of(kind: type) -> dict[str, str]:
    """The text of each field, of the list "Attributes" in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        names: list[str] = []
        for line in inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:\n")[2].splitlines():
            if (entry := _ENTRY.match(line)) is not None:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, line[entry.end() :])
            elif names:
                found |= dict.fromkeys(names, f"{found[names[0]]} {line.strip()}".rstrip())
    return found
