"""HTTP front of fdasync: an ASGI app over anything with the face of an engine.

`app(generator, config)` is mounted into an application of one's own, or served by `fdasync http`. Names are imported
when they are first used, so that listing the command costs no web framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_http.application import app
    from fdasync_http.config import HttpConfig

__all__ = ["HttpConfig", "app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'application' if name == 'app' else 'config'}"), name)
