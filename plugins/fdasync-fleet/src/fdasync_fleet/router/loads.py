"""The load of all instances as columns of numbers, and as bitsets of the instances that may take a request.

One row, the *slot*, belongs to each instance. `InstanceHandle` writes its row when something changes, which takes no
longer with more instances; `choice.py` reads whole columns, so that no Python runs for each instance when a request is
routed. Pure; knows no requests and no blocks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fdasync_fleet.fields import Role
    from fdasync_fleet.router.limits import Room

N = TypeVar("N", int, float)

_FIRST_ROWS = 64
_COLUMNS = ("work", "live", "counted", "burden", "used", "total")


class Column(Generic[N]):
    """A number for each slot. A single one of numpy's costs several times what one of Python's does, and a request
    reads and writes some twenty.

    Attributes:
        one: the numbers, to read a single one, or to write one of a column whose `floor` no choice reads.
        all: the same memory, to compute with all of them.
        floor: no number of a slot in use is below it, as far as `put` wrote them. A choice that has found less looks no
            further.
    """

    __slots__ = ("all", "floor", "one")

    def __init__(self, numbers: array[N], floor: float) -> None:
        self.one: array[N] = numbers
        self.all: NDArray[Any] = np.frombuffer(numbers, numbers.typecode)
        self.floor = floor

    def put(self, slot: int, number: N) -> None:
        self.one[slot] = number
        if number < self.floor:
            self.floor = number

    def raise_floor(self, rows: int) -> None:
        """To the least of the first slots."""
        self.floor = float(self.all[:rows].min())


class Loads:
    """See the module.

    Attributes:
        work: prompt tokens that an instance has to compute: as many as it reported, or as were sent to it if more.
        live: requests of this router.
        counted: requests that its latest status counts.
        burden: what a request finds on a mixed instance, in prompt tokens: `work`, and a part of the tokens in use.
        used, total: device blocks in use by its latest status, and all.
        working: bitset of the instances that take work.
        roles: bitset of the instances of each role.
    """

    def __init__(self) -> None:
        self.work: Column[int]
        self.live: Column[int]
        self.counted: Column[int]
        self.burden: Column[float]
        self.used: Column[int]
        self.total: Column[int]
        self.working = 0
        self.roles: dict[Role, int] = {"mixed": 0, "prefill": 0, "decode": 0, "router": 0}
        self._rooms: dict[Room, int] = {}
        self._known: dict[int, tuple[Role, Room]] = {}
        self._free: list[int] = []
        self._rows = 0
        self._latest = 0
        self._slots: NDArray[np.intp] = np.zeros(0, np.intp)
        self._resize(_FIRST_ROWS)

    def _resize(self, capacity: int) -> None:
        for name in _COLUMNS:
            numbers = array("d" if name == "burden" else "q", bytes(8 * capacity))
            floor = 0.0
            if self._rows:
                before = getattr(self, name)
                numbers[: self._rows], floor = before.one[: self._rows], before.floor
            setattr(self, name, Column(numbers, floor))
        self._capacity = capacity

    def new_slot(self) -> int:
        """The row of a new instance, the lowest that is free."""
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        if self._rows == self._capacity:
            self._resize(2 * self._capacity)
        self._rows += 1
        for name in _COLUMNS:
            getattr(self, name).put(self._rows - 1, 0)
        return self._rows - 1

    def raise_floor(self, costs: Column[int] | Column[float]) -> None:
        """All of a column was looked at: its floor is its least number again."""
        costs.raise_floor(self._rows)

    def give_back(self, slot: int) -> None:
        """The instance of this row is gone."""
        self.set_working(slot, works=False)
        self._forget_room(slot)
        for name in _COLUMNS:
            getattr(self, name).put(slot, 0)
        self._free.append(slot)

    def set_working(self, slot: int, *, works: bool) -> None:
        if works:
            self.working |= 1 << slot
        else:
            self.working &= ~(1 << slot)

    def set_room(self, slot: int, role: Role, room: Room) -> None:
        """Role and limits of an instance, by its latest handshake."""
        self._forget_room(slot)
        self._known[slot] = role, room
        self.roles[role] |= 1 << slot
        self._rooms[room] = self._rooms.get(room, 0) | 1 << slot

    def _forget_room(self, slot: int) -> None:
        if (known := self._known.pop(slot, None)) is None:
            return
        role, room = known
        self.roles[role] &= ~(1 << slot)
        self._rooms[room] &= ~(1 << slot)
        if not self._rooms[room]:
            del self._rooms[room]

    def able(self, role: Role, fits: Callable[[Room], bool]) -> int:
        """Bitset of the instances of a role that take work and can hold a request. `fits` is asked once for all
        instances with the same limits."""
        able = self.working & self.roles[role]
        if not able:
            return 0
        fitting = 0
        for room, bits in self._rooms.items():
            if bits & able and fits(room):
                fitting |= bits
        return able & fitting

    def slots(self, bits: int) -> NDArray[np.intp]:
        """The slots of a bitset, in order; do not change them. The latest bitset's slots are kept: one role is mostly
        able as a whole."""
        if bits == self._latest:
            return self._slots
        nbytes = -(-self._rows // 8)
        mask = np.frombuffer(bits.to_bytes(nbytes, "little"), np.uint8)
        self._latest, self._slots = bits, np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        return self._slots
