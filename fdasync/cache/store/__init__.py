"""The contract of stores, the format of stored blocks with its checks, and the store in memory, their model."""

from fdasync.cache.store.base import (
    DONE,
    EXISTS,
    MISS,
    Arrival,
    Capabilities,
    Item,
    Moves,
    Outcome,
    Piece,
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
    "Arrival",
    "Capabilities",
    "Item",
    "Moves",
    "Outcome",
    "Part",
    "Piece",
    "Status",
    "Store",
    "StoreUsage",
    "finish",
]
