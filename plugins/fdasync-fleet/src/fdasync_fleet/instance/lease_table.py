"""The leases that a decode side has granted or is deciding, by prefill instance and name.

A prefill side names a lease by (request, attempt), and a repeated request finds the same lease (idempotent). A cancel
that overtakes its request leaves a *tombstone*, by which the request is denied when it comes. Tombstones are bounded in
number and time. Pure; knows no messages. Called by `decode_service.py`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

#: life of a tombstone: longer than a message can be on its way
TOMBSTONE_S = 120.0
MAX_TOMBSTONES = 4096


class Held(Protocol):
    """A lease in a table.

    Attributes:
        owner: the prefill instance, compared by identity.
        name: its (request, attempt).
        group: the scheduler's number of its group of samples.
    """

    owner: object
    name: tuple[str, int]
    group: int


T = TypeVar("T", bound=Held)


class LeaseTable(Generic[T]):
    """See the module. `owner`s are compared by identity."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[int, tuple[str, int]], T] = {}
        self._by_group: dict[int, T] = {}
        self._dead: dict[tuple[str, int], float] = {}

    def __len__(self) -> int:
        return len(self._by_group)

    def add(self, lease: T) -> None:
        self._by_name[id(lease.owner), lease.name] = lease
        self._by_group[lease.group] = lease

    def find(self, owner: object, name: tuple[str, int]) -> T | None:
        return self._by_name.get((id(owner), name))

    def group(self, group: int) -> T | None:
        return self._by_group.get(group)

    def of(self, owner: object) -> list[T]:
        """All leases of one owner."""
        return [lease for lease in self._by_group.values() if lease.owner is owner]

    def all(self) -> list[T]:
        return list(self._by_group.values())

    def remove(self, lease: T) -> None:
        """Remove a lease that is over; idempotent."""
        if self._by_group.pop(lease.group, None) is not None:
            del self._by_name[id(lease.owner), lease.name]

    def bury(self, name: tuple[str, int], now: float) -> None:
        """An unknown lease was cancelled: leave a tombstone."""
        self._dead.pop(name, None)
        self._dead[name] = now + TOMBSTONE_S
        for old in list(self._dead):
            if len(self._dead) <= MAX_TOMBSTONES and self._dead[old] > now:
                break
            del self._dead[old]

    def is_buried(self, name: tuple[str, int], now: float) -> bool:
        return self._dead.get(name, 0.0) > now
