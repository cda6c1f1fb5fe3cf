"""Which leases an instance has given whom, by the name that the other side uses. Pure.

A lease is asked for by (request, attempt), and asking again is answered again (idempotent). A cancel that overtakes its
question leaves a *tombstone*: when the question comes, it is refused. Tombstones are bounded in number and time.

Used by `decode_service.py`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

#: of tombstones: as long as a question may be on its way, and some
TOMBSTONE_S = 120.0
MAX_TOMBSTONES = 4096


class Held(Protocol):
    """What a book keeps: knows whose it is, and its own names."""

    owner: object
    name: tuple[str, int]
    group: int


T = TypeVar("T", bound=Held)


class LeaseBook(Generic[T]):
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
        """All of one owner."""
        return [lease for lease in self._by_group.values() if lease.owner is owner]

    def all(self) -> list[T]:
        return list(self._by_group.values())

    def remove(self, lease: T) -> None:
        """It is over; idempotent."""
        if self._by_group.pop(lease.group, None) is not None:
            del self._by_name[id(lease.owner), lease.name]

    def bury(self, name: tuple[str, int], now: float) -> None:
        """A lease that is not known was cancelled: whoever asks for it later is told no."""
        self._dead.pop(name, None)
        self._dead[name] = now + TOMBSTONE_S
        for old in list(self._dead):
            if len(self._dead) <= MAX_TOMBSTONES and self._dead[old] > now:
                break
            del self._dead[old]

    def is_buried(self, name: tuple[str, int], now: float) -> bool:
        return self._dead.get(name, 0.0) > now
