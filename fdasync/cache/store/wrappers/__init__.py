"""Stores around stores, one concern each.

An engine's order, from the outside in (`engine/store_stack.py`): Trace, Breaker, Limits, Timeout. Limits stands outside
of Timeout, so that waiting in line is not time of the call. Exclusive is next to a store object that an engine was
given. Each is a `Store` and passes the same suite as the store
inside. They use the running loop's time, so virtual time works; no threads, and no task outlives `aclose`.
"""

from __future__ import annotations

from fdasync.cache.store.wrappers.base import Wrapper
from fdasync.cache.store.wrappers.breaker import Breaker, BreakerState
from fdasync.cache.store.wrappers.exclusive import Exclusive
from fdasync.cache.store.wrappers.limits import Limits
from fdasync.cache.store.wrappers.timeout import Timeout
from fdasync.cache.store.wrappers.trace import StoreCall, Trace

__all__ = [
    "Breaker",
    "BreakerState",
    "Exclusive",
    "Limits",
    "StoreCall",
    "Timeout",
    "Trace",
    "Wrapper",
]
