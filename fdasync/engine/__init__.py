"""One engine: front, preparation, driver, output, weights, life; knows no other instance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.engine import Engine, EngineStats
    from fdasync.engine.stream import Generation, TokenStream

_HOMES = {
    "fdasync.engine.config": ("EngineConfig",),
    "fdasync.engine.engine": (
        "Engine",
        "EngineStats",
    ),
    "fdasync.engine.stream": (
        "Generation",
        "TokenStream",
    ),
}

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Generation",
    "TokenStream",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
