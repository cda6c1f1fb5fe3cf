"""Stores around stores: one concern each, composed by whoever opens an engine's store.

An engine's order, from the outside in (`store_stack.py`): Trace, Breaker, Limits, Timeout. Limits stands outside of
Timeout, so that waiting in line is not time of the call. Retry is for callers whose stores want it, inside of Breaker;
Latency and FaultyStore are for tests, next to the store. Each is a `Store` and passes the same suite as what it wraps.
They use the running loop's time, so virtual time works; no threads, and no task outlives `aclose`.
"""

from __future__ import annotations

from fdasync.cache.store.wrappers.base import Verb, Wrapper
from fdasync.cache.store.wrappers.breaker import Breaker, BreakerState
from fdasync.cache.store.wrappers.faults import FaultyStore, StoreFaultKind, StoreFaults
from fdasync.cache.store.wrappers.latency import Latency
from fdasync.cache.store.wrappers.limits import Limits
from fdasync.cache.store.wrappers.retry import Retry
from fdasync.cache.store.wrappers.timeout import Timeout
from fdasync.cache.store.wrappers.trace import StoreCall, Trace

__all__ = [
    "Breaker",
    "BreakerState",
    "FaultyStore",
    "Latency",
    "Limits",
    "Retry",
    "StoreCall",
    "StoreFaultKind",
    "StoreFaults",
    "Timeout",
    "Trace",
    "Verb",
    "Wrapper",
]
