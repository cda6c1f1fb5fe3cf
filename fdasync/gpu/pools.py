"""Events and page-locked buffers that are used again: taken, held while the device may use them, released once.

A caller gives a hold to a completion port with the work that uses it, and the port releases it when the work is done.
The waiting task never releases it: it may be cancelled long before (docs/design.md, section 2). Pools belong to one
loop and are not safe to use from other threads.

Knows nothing of ports or streams. Called by runners.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fdasync.errors import BadInput, BuffersOut, InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

E = TypeVar("E")

_MIN_NBYTES = 4096


class EventHold(Generic[E]):
    """One event, for one recording.

    Attributes:
        event: the pool's own; not to be touched after `release`.
        name: purpose of the event, for reports.
    """

    __slots__ = ("_pool", "event", "name")

    def __init__(self, pool: EventPool[E], event: E, name: str) -> None:
        self._pool: EventPool[E] | None = pool
        self.event = event
        self.name = name

    def release(self) -> None:
        """Give it back. Raises InvariantBroken the second time."""
        pool, self._pool = self._pool, None
        if pool is None:
            raise InvariantBroken(f"the hold of an event ({self.name}) was released twice")
        pool._take_back(self)


class EventPool(Generic[E]):
    """Events, made when none is free, and kept: as many as were ever in use at a time.

    Args:
        factory: makes one, e.g. `torch.cuda.Event`.
    """

    def __init__(self, factory: Callable[[], E]) -> None:
        self._factory = factory
        self._free: list[E] = []
        self._out: Counter[str] = Counter()

    def take(self, name: str = "event") -> EventHold[E]:
        """An event that is not in use. Raises what the factory raises."""
        event = self._free.pop() if self._free else self._factory()
        self._out[name] += 1
        return EventHold(self, event, name)

    @property
    def outstanding(self) -> dict[str, int]:
        """How many are in use, by name."""
        return dict(+self._out)

    def _take_back(self, hold: EventHold[E]) -> None:
        self._out[hold.name] -= 1
        self._free.append(hold.event)


class PinnedHold:
    """Host memory that the device can copy to and from without the host's help; its first contents are undefined.

    Attributes:
        tensor: uint8 [nbytes] on the CPU, the pool's memory; not to be touched after `release`.
        array: the same bytes as a numpy array, uint8 [nbytes].
        name: purpose of the buffer, for reports.
    """

    __slots__ = ("_pool", "_whole", "array", "name", "tensor")

    def __init__(self, pool: PinnedPool, whole: torch.Tensor, nbytes: int, name: str) -> None:
        self._pool: PinnedPool | None = pool
        self._whole = whole
        self.tensor = whole[:nbytes]
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = self.tensor.numpy()
        self.name = name

    def release(self) -> None:
        """Give it back. Raises InvariantBroken the second time."""
        pool, self._pool = self._pool, None
        if pool is None:
            raise InvariantBroken(f"the hold of a buffer ({self.name}) was released twice")
        pool._take_back(self._whole, self.name)


class PinnedPool:
    """Page-locked buffers by size: the next power of two, at least 4 KiB.

    Making a buffer takes up to milliseconds and may wait for the device, so take and release at the start the buffers
    that a step will need. torch keeps the pages of buffers that the pool gives up.

    Args:
        max_nbytes: most bytes at a time, in use and free together.
        pinned: False on machines without CUDA, and for devices that need none: plain memory.
        name: part of errors.

    Attributes:
        nbytes: bytes of all buffers, in use and free.
    """

    def __init__(self, max_nbytes: int, *, pinned: bool, name: str = "pinned buffers") -> None:
        self._max_nbytes = max_nbytes
        self._pinned = pinned
        self._name = name
        self._free: dict[int, list[torch.Tensor]] = {}
        self._out: Counter[str] = Counter()
        self.nbytes = 0

    def take(self, nbytes: int, name: str = "buffer") -> PinnedHold:
        """A buffer of at least this size that is not in use.

        Raises BadInput if the pool can never have one (a negative size, or one above the limit), BuffersOut if there
        is no room now, and what torch raises when memory cannot be page-locked (RuntimeError).
        """
        if nbytes < 0:
            raise BadInput("nbytes", f"is {nbytes}", limit=0)
        size = max(_MIN_NBYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        if size > self._max_nbytes:
            raise BadInput("nbytes", f"{self._name}: {nbytes} needs {size}", limit=self._max_nbytes)
        free = self._free.get(size)
        if free:
            whole = free.pop()
        else:
            self._make_room(size)
            whole = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)  # blocking: page-locks, once for each
            self.nbytes += size
        self._out[name] += size
        return PinnedHold(self, whole, nbytes, name)

    @property
    def outstanding(self) -> dict[str, int]:
        """How many bytes are in use, by name."""
        return dict(+self._out)

    def _make_room(self, size: int) -> None:
        """Give up free buffers of other sizes, largest first, where that helps."""
        free_nbytes = sum(each * len(buffers) for each, buffers in self._free.items())
        if self.nbytes - free_nbytes + size > self._max_nbytes:
            raise BuffersOut(self._name, size, self._max_nbytes, self.outstanding)
        for each in sorted(self._free, reverse=True):
            while self._free[each] and self.nbytes + size > self._max_nbytes:
                self._free[each].pop()
                self.nbytes -= each

    def _take_back(self, whole: torch.Tensor, name: str) -> None:
        self._out[name] -= whole.numel()
        self._free.setdefault(whole.numel(), []).append(whole)
