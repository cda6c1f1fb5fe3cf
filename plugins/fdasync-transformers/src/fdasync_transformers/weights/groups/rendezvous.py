"""A rank's waits for the keys of its group, all of which end at one time.

gloo gives every key a time of its own, and every connection five times its limit. Knows no tensors and no groups.
Called by `group.py`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch declares no types of these
dist: Any = torch_dist
_LEAST_S = 0.01
#: so many times its limit gloo waits for a rank that has told its address and is gone
GLOO_CONNECTS = 5


def left_s(until: float) -> float:
    """Seconds until a time of `time.monotonic`; never 0, which means without a limit."""
    return max(until - time.monotonic(), _LEAST_S)


class TimedStore(dist.Store):  # type: ignore[misc]
    """A store all of whose waits end at one time, for gloo, which would wait as long for each key.

    Args:
        keys: the store; it is this one's from now on.
        until: that time, by `time.monotonic`.
    """

    def __init__(self, keys: Any, until: float) -> None:
        super().__init__()
        self._keys = keys
        self._until = until

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._keys.get(key)

    def wait(self, keys: Sequence[str], _: timedelta | None = None) -> None:
        self._keys.wait(keys, timedelta(seconds=left_s(self._until)))
