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
    # looked up once: every part of every call comes by here, twice
    sizes, most, most_nbytes = [region.nbytes for region in regions], limits.max_parts, limits.max_item_nbytes
    for item in items:
        parts, total = item.parts, 0
        if len(parts) > most:
            problem = f"{item.key} has {len(parts)} parts"
            raise StoreRejected(limits.name, problem, f"at most {most} are taken")
        for part in parts:
            region, offset, nbytes = part.region, part.offset, part.nbytes
            if not 0 <= region < len(sizes):
                raise StoreRejected(limits.name, f"{item.key} names region {region} of {len(sizes)}")
            stop = offset + nbytes
            if not 0 <= offset <= stop <= sizes[region]:
                problem = f"{item.key} names bytes {offset} to {stop} of a region of {sizes[region]}"
                raise StoreRejected(limits.name, problem)
            total += nbytes
        if not 1 <= total <= most_nbytes:
            problem = f"{item.key} has {total} bytes"
            raise StoreRejected(limits.name, problem, f"1 to {limits.max_item_nbytes} are taken")
