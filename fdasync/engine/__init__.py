"""One engine, from call to result: frontend, preparation, driver, output, weights, life. It knows no other instance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.engine import Engine

_HOMES = {"Engine": "engine", "EngineConfig": "config"}

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> Any:
    # lazy: the child that tokenises is in this room too, and loads no engine
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
