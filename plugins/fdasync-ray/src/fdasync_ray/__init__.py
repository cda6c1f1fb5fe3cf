"""Fleets on a Ray cluster: `RayFleet` starts and keeps a fleet, `attach` finds it from any process of the cluster.

Names are imported when they are first used, so that listing the command does not import Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_ray.client import FleetClient, attach
    from fdasync_ray.config import FleetConfig, Member
    from fdasync_ray.fleet import RayFleet
    from fdasync_ray.room import NoRoom

_HOMES = {
    "FleetClient": "client", "FleetConfig": "config", "Member": "config", "NoRoom": "room", "RayFleet": "fleet",
    "attach": "client",
}  # fmt: skip

__all__ = ["FleetClient", "FleetConfig", "Member", "NoRoom", "RayFleet", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
