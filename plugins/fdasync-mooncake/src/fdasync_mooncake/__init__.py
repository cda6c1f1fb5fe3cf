"""A Mooncake Store as a store of fdasync: the tier that many machines share. See the README."""

from __future__ import annotations

from fdasync_mooncake.config import MooncakeConfig
from fdasync_mooncake.store import MooncakeStore

__all__ = ["MooncakeConfig", "MooncakeStore"]
