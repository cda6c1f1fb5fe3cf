"""The contract of stores, the format of stored blocks with its checks, and the store in memory, their model."""

from fdasync.cache.store.base import (
    DONE,
    EXISTS,
    MISS,
    Capabilities,
    Item,
    Outcome,
    Status,
    Store,
    StoreUsage,
    finish,
)
from fdasync.ipc.shared_memory import Part

__all__ = [
    "DONE",
    "EXISTS",
    "MISS",
    "Capabilities",
    "Item",
    "Outcome",
    "Part",
    "Status",
    "Store",
    "StoreUsage",
    "finish",
]
