"""For tests of transports and of fleets: the conformance suite of transports (`TransportTests`); networks, transports
and processes in virtual time (`sim`); limits for tests with real links (`patience`).

Names are imported when first used. Nothing in the package imports this room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_fleet.testing.transports.suite import TransportTests

__all__ = ["TransportTests"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fdasync_fleet.testing.transports.suite"), name)
