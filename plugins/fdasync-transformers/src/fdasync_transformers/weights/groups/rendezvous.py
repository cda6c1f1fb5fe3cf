"""A rank's waits for the keys of its group; all waits end at one time, or when nobody wants them any more.

gloo gives every key a time of its own, and every connection five times its limit. Knows no tensors and no groups.
Called by `group.py`.
"""

from __future__ import annotations

import select
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch declares no types of these
dist: Any = torch_dist
_LEAST_S = 0.01
# between two looks at whether a wait is wanted still
_LOOK_S = 0.1
#: so many times its limit gloo waits for a rank that has told its address and is gone
GLOO_CONNECTS = 5


def left_s(until: float) -> float:
    """Seconds until a time of `time.monotonic`; never 0, which means without a limit."""
    return max(until - time.monotonic(), _LEAST_S)


class Unmet(RuntimeError):
    """The ranks of a group have not met; the words say why."""


def check_wanted(stop: int) -> None:
    """Raise Unmet where a join is wanted no more: the pipe of this fd is at its end. -1: it always is."""
    if stop >= 0:
        poll = select.poll()
        poll.register(stop, select.POLLIN)
        if poll.poll(0):
            raise Unmet("it was given up")


class TimedStore(dist.Store):  # type: ignore[misc]  # torch's class is Any
    """A store all of whose waits end at one time, for gloo, which would wait as long for each key.

    Args:
        keys: the store; it is this one's from now on.
        until: that time, by `time.monotonic`.
        stop: see `check_wanted`.

    A wait raises Unmet, whose words name the rank that did not come.
    """

    def __init__(self, keys: Any, until: float, stop: int = -1) -> None:
        super().__init__()
        self._keys = keys
        self._until = until
        self._stop = stop

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._keys.get(key)

    def wait(self, keys: Sequence[str], _: timedelta | None = None) -> None:
        while True:
            check_wanted(self._stop)
            left = left_s(self._until)
            try:
                self._keys.wait(keys, timedelta(seconds=min(left, _LOOK_S)))
            except dist.DistStoreError as error:
                if left <= _LEAST_S:
                    # of the key of a rank the last word is its number
                    raise Unmet(f"rank {keys[0].rpartition('/')[2]} has not come") from error
            else:
                return
