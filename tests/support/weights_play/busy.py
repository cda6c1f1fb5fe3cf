"""Whether a change of an engine that a caller left is still under way. Called by `play.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync import Engine


def is_busy(engine: Engine) -> bool:
    return bool(engine.weights.changes._made)
