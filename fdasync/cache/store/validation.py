"""Whether a call to a store keeps the contract's limits, checked before anything is touched. Pure.

Every store calls these functions first, so that all stores refuse a call that breaks the contract in the same words
(`StoreRejected`). They know `store/base.py` and the sizes of the regions, no store.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fdasync.errors import StoreRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Capabilities, Item
    from fdasync.ipc.shared_memory import SharedRegion

_KEY = re.compile(r"[0-9a-z_-]([0-9a-z./_-]*[0-9a-z_-])?")


def check_keys(keys: Sequence[str], limits: Capabilities) -> None:
    """Raises StoreRejected for too many keys, and for the first string that is no key."""
    if len(keys) > limits.max_batch:
        raise StoreRejected(limits.name, f"{len(keys)} items in one call", f"at most {limits.max_batch} are taken")
    for key in keys:
        if len(key) > limits.max_key_chars:
            problem = f"a key of {len(key)} characters"
            raise StoreRejected(limits.name, problem, f"at most {limits.max_key_chars} are taken")
        if not _KEY.fullmatch(key) or ".." in key:
            raise StoreRejected(limits.name, f"{key!r} is not a key")


def check_items(items: Sequence[Item], limits: Capabilities, regions: Sequence[SharedRegion]) -> None:
    """Raises StoreRejected for a call or an item beyond the limits, and for parts that lie outside the regions."""
    check_keys([item.key for item in items], limits)
    for item in items:
        if len(item.parts) > limits.max_parts:
            problem = f"{item.key} has {len(item.parts)} parts"
            raise StoreRejected(limits.name, problem, f"at most {limits.max_parts} are taken")
        for part in item.parts:
            if not 0 <= part.region < len(regions):
                raise StoreRejected(limits.name, f"{item.key} names region {part.region} of {len(regions)}")
            stop = part.offset + part.nbytes
            if not 0 <= part.offset <= stop <= regions[part.region].nbytes:
                problem = f"{item.key} names bytes {part.offset} to {stop} of a region of {regions[part.region].nbytes}"
                raise StoreRejected(limits.name, problem)
        if not 1 <= item.nbytes <= limits.max_item_nbytes:
            problem = f"{item.key} has {item.nbytes} bytes"
            raise StoreRejected(limits.name, problem, f"1 to {limits.max_item_nbytes} are taken")
