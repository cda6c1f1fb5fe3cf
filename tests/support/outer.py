"""The environment of a pytest that tests start."""

from __future__ import annotations

import os


def outer_environment(**more: str) -> dict[str, str]:
    """That of this process, but for what a test that runs around it, and its coverage, left there; and `more`. Plugins
    of others warn inside of a process of xdist, and a warning is an error here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE_"))}
    return {**kept, **more}
