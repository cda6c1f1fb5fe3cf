"""What stands between an engine and its store, so that no store can hold up or harm the engine: `GuardedStore`."""

from __future__ import annotations

from fdasync.cache.store.guard.call import Call, waited
from fdasync.cache.store.guard.guard import GuardedStore
from fdasync.cache.store.guard.limits import GuardLimits

__all__ = ["Call", "GuardLimits", "GuardedStore", "waited"]
