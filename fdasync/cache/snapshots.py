"""Recurrent state that blocks carry: what it is (`StateSpec`), and the places that hold it (`SnapshotPool`). Pure.

A recurrent layer keeps one state for each sequence, which every token changes. A *snapshot* is a copy of a sequence's
state as it was behind the last token of a block: an optional attachment of that block, which goes when the block goes.
A sequence can go on from a block only if that block has a snapshot. Snapshots sit in places of their own on the device
and on the host, with budgets and an order of eviction of their own (docs/design.md, rule 45).

A place on the device has one writer at a time. The pool gives a place to another snapshot only when every step that
names it is done.

This module knows no sequence, no identity and no bytes. The scheduler makes the pool, the pool of blocks tells it of
blocks that go, and the scheduler's planners take places from it. Runners tell their specs; the engine and the runners
make the memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Protocol

import msgspec

from fdasync.errors import BadInput, InvariantBroken

_DTYPE_NBYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint64": 8}
# each spec begins at a multiple of this in a snapshot, whatever its dtype
_ALIGNMENT_NBYTES = 256


class StateSpec(msgspec.Struct, frozen=True):
    """One kind of recurrent state of a sequence.

    Attributes:
        name: "recurrent" and "convolution" are the transformers runner's.
        shape: of one layer.
        dtype: float16, bfloat16, float32 or uint64.
        layers: hidden-layer numbers, in the order in which a snapshot has them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises BadInput."""
        if not self.name or not self.layers:
            raise BadInput("state_specs", f"{self.name!r} names no state, or no layer")
        if not self.shape or min(self.shape) < 1:
            raise BadInput("state_specs.shape", f"of {self.name!r} is {self.shape}", limit="sizes of 1 or more")
        if self.dtype not in _DTYPE_NBYTES:
            raise BadInput(
                "state_specs.dtype", f"of {self.name!r} is {self.dtype!r:.100}", limit=", ".join(_DTYPE_NBYTES)
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in a snapshot, padded so that the next spec is aligned."""
        nbytes = len(self.layers) * math.prod(self.shape) * _DTYPE_NBYTES[self.dtype]
        return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def snapshot_nbytes(specs: tuple[StateSpec, ...]) -> int:
    """Bytes of one snapshot: the specs in their order, each as [layers, *shape]."""
    return sum(spec.nbytes for spec in specs)


class Carrier(Protocol):
    """A block, as far as its snapshot knows it (`Block` in `blocks.py`)."""

    snapshot: Snapshot | None
    key: bytes | None
    branches: int

    @property
    def awaits_state(self) -> bool:
        """It is to be written to a store, with its snapshot."""
        ...

    def without_state(self) -> int:
        """Its snapshot is lost to the host: no store can get it with its state. Returns 1 if one was to, else 0."""
        ...


class Snapshot:
    """A state as it was at the end of a block: its places, and who uses them.

    Attributes:
        block: the block at whose end it was taken; None once the block is gone, or another snapshot took its place, and
            where it was taken within a block, for a hand-over.
        place: on the device; -1 while it has none.
        on_device: its bytes there are whole, or will be when the step that takes it is done.
        host: on the host; -1 while it has no place there.
        on_host: its bytes on the host are whole.
        step: the step that takes it, until that step is done; else -1.
        awaited: one of several steps takes it, and it is not known yet which: no sequence may start from it.
        busy: the last step that reads or writes its place on the device; -1: none.
        pins: sequences that are about to start from it.
        moves: copies in flight that read or write it.
        holds: transfers to and from a store or another instance that use its place on the host, and requests that wait
            to start from it, or to be handed over with it. What is held is not lost.
        arriving: the copy that brings it to the device, while under way; else -1.
        uses: how often a sequence started from it.
        passed: the sequence that took it has a later one, and no sequence started from it since.
    """

    __slots__ = (
        "arriving",
        "awaited",
        "block",
        "busy",
        "holds",
        "host",
        "moves",
        "on_device",
        "on_host",
        "passed",
        "pins",
        "place",
        "step",
        "uses",
    )

    def __init__(self, block: Carrier | None, place: int, step: int) -> None:
        self.block = block
        self.place = place
        self.on_device = True
        self.host = -1
        self.on_host = False
        self.step = step
        self.awaited = False
        self.busy = step
        self.pins = 0
        self.moves = 0
        self.holds = 0
        self.arriving = -1
        self.uses = 0
        self.passed = False

    def hold(self) -> None:
        """Keep it until the pool's `unhold` was called as often."""
        self.holds += 1

    def can_start(self, step: int) -> bool:
        """Whether a sequence may start from it in `step`, at once or after a copy from the host."""
        return self.step < step and not self.awaited

    @property
    def is_spare(self) -> bool:
        """It may be lost before any other one is: a sequence passed it, and no store waits for it."""
        return self.passed and (self.block is None or not self.block.awaits_state)

    def __repr__(self) -> str:
        return f"Snapshot({self.place}, host={self.host}, step={self.step}, busy={self.busy}, pins={self.pins})"


class SnapshotPool:
    """All places of snapshots on the device and on the host, and every snapshot that has one.

    Args:
        num_places, num_host_places: of the device and of the host.

    Attributes:
        num_places, num_host_places: as given.
        done_step: the last step that is done.
        taken, resumed: snapshots that steps took, and sequences that started from one.
        lost: snapshots that left their last place to make room for others.
        refused: snapshots that were not taken since no place was free.
        unwritten: blocks that a store should have got and did not, since their snapshot had to make room.
    """

    def __init__(self, num_places: int, num_host_places: int = 0) -> None:
        self.num_places = num_places
        self.num_host_places = num_host_places
        self.done_step = -1
        self.taken = self.resumed = self.lost = self.refused = self.unwritten = 0
        self._free = list(range(num_places - 1, -1, -1))
        self._host_free = list(range(num_host_places - 1, -1, -1))
        # in the order of last use, but demoted ones come first
        self._live: OrderedDict[Snapshot, None] = OrderedDict()
        # by step in flight, the snapshots that it reads or writes
        self._named: dict[int, list[Snapshot]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_host_free(self) -> int:
        return len(self._host_free)

    def live(self) -> list[Snapshot]:
        """Every snapshot that has a place, in the order in which they make room."""
        return list(self._live)

    # -- on the device ------------------------------------------------------------------------------

    def take(self, block: Carrier | None, step: int, *, awaited: bool = False) -> Snapshot | None:
        """A place for the state that `step` shall copy at the end of `block`, which has no snapshot; None: all places
        are in use by steps, copies or sequences about to start. Without a block the caller holds it at once. `awaited`:
        the step may not come to the end of the block; then a later one does (`await_in`)."""
        if block is not None and block.snapshot is not None:
            raise InvariantBroken(f"{block} has a snapshot already")
        if not self._make_room():
            self.refused += 1
            return None
        snapshot = Snapshot(block, self._free.pop(), step)
        snapshot.awaited = awaited
        if block is not None:
            block.snapshot = snapshot
        self._named.setdefault(step, []).append(snapshot)
        self.taken += 1
        self._use(snapshot)
        return snapshot

    def await_in(self, snapshot: Snapshot, step: int) -> None:
        """`step` takes it, too, unless a step before it did."""
        snapshot.step = snapshot.busy = step
        self._named.setdefault(step, []).append(snapshot)

    def reached(self, snapshot: Snapshot) -> None:
        """A step that is done has taken it."""
        snapshot.awaited = False

    def has_room(self, count: int = 1) -> bool:
        """So many places on the device could be had now."""
        lacking = count - len(self._free)
        for snapshot in self._live:
            if lacking <= 0:
                break
            lacking -= snapshot.place >= 0 and self._may_go(snapshot)
        return lacking <= 0

    def bring(self, snapshot: Snapshot) -> bool:
        """Give a snapshot of the host a place on the device, to be filled by a copy; False: there is none."""
        if snapshot.place >= 0 or not snapshot.on_host:
            raise InvariantBroken(f"{snapshot} cannot be brought to the device")
        # it must not go for its own place
        snapshot.pins += 1
        found = self._make_room()
        snapshot.pins -= 1
        if found:
            snapshot.place = self._free.pop()
        return found

    def pin(self, snapshot: Snapshot) -> None:
        """A sequence is about to start from it: it stays on the device."""
        snapshot.pins += 1
        snapshot.uses += 1
        self._use(snapshot)

    def unpin(self, snapshot: Snapshot) -> None:
        """The sequence does not start after all."""
        snapshot.pins -= 1
        self._settle(snapshot)

    def started(self, snapshot: Snapshot, step: int) -> int:
        """A pinned snapshot is what a sequence starts from in `step`; returns its place on the device."""
        if not snapshot.on_device or not snapshot.can_start(step):
            raise InvariantBroken(f"{snapshot} is not on the device for step {step}")
        snapshot.pins -= 1
        snapshot.busy = max(snapshot.busy, step)
        self._named.setdefault(step, []).append(snapshot)
        self.resumed += 1
        return snapshot.place

    def step_done(self, step: int) -> None:
        """No step up to `step` uses a place any more."""
        self.done_step = step
        for snapshot in self._named.pop(step, ()):
            if snapshot.step == step:
                snapshot.step = -1
            self._settle(snapshot)

    def move(self, snapshot: Snapshot, block: Carrier) -> None:
        """Attach it to another computation of the same block, which has no snapshot."""
        if snapshot.block is not None:
            snapshot.block.snapshot = None
        snapshot.block = block
        block.snapshot = snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """No sequence will start from it any more. Its places come back when nothing uses them."""
        if snapshot.block is not None:
            self.unwritten += snapshot.block.without_state()
            snapshot.block.snapshot = None
            snapshot.block = None
        snapshot.awaited = False
        self._settle(snapshot)

    def demote(self, snapshot: Snapshot) -> None:
        """There is a better one to start from: it makes room before all that are used, and is not copied out for it."""
        if snapshot in self._live:
            snapshot.passed = True
            self._live.move_to_end(snapshot, last=False)

    def clear_device(self) -> None:
        """Nothing is on the device any more. No step and no copy uses a place, and no sequence is about to start."""
        for snapshot in [one for one in self._live if one.place >= 0]:
            if self._in_use(snapshot):
                raise InvariantBroken(f"{snapshot} is in use, and the device is to be cleared")
            self._leave_device(snapshot)

    def _make_room(self) -> bool:
        if self._free:
            return True
        victim = lossy = None
        for snapshot in self._live:
            if snapshot.place >= 0 and self._may_go(snapshot):
                lossy = lossy or snapshot
                if snapshot.on_host or snapshot.is_spare:
                    victim = snapshot
                if victim or not self.num_host_places:
                    break
        victim = victim or lossy
        if victim is None:
            return False
        self._leave_device(victim)
        return True

    def _may_go(self, snapshot: Snapshot) -> bool:
        """Its place on the device may be given to another one."""
        return not self._in_use(snapshot) and (snapshot.on_host or not snapshot.holds)

    def _in_use(self, snapshot: Snapshot) -> bool:
        return bool(snapshot.pins or snapshot.moves) or snapshot.awaited or snapshot.busy > self.done_step

    def _leave_device(self, snapshot: Snapshot) -> None:
        self._free.append(snapshot.place)
        snapshot.place = -1
        snapshot.on_device = False
        if not snapshot.on_host:
            self.lost += 1
            self.drop(snapshot)

    # -- on the host --------------------------------------------------------------------------------

    def next_dirty(self, count: int) -> list[Snapshot]:
        """The least recently used snapshots that are on the device alone, not in use, and must not be lost."""
        found: list[Snapshot] = []
        for snapshot in self._live:
            if len(found) == count:
                break
            kept = snapshot.block is not None and not snapshot.is_spare
            if snapshot.host < 0 and kept and not self._in_use(snapshot):
                found.append(snapshot)
        return found

    def has_clean(self, count: int) -> bool:
        """So many places on the device could be had now by losing no snapshot, or only snapshots that may be lost."""
        lacking = count - len(self._free)
        for snapshot in self._live:
            if lacking <= 0:
                break
            clean = snapshot.place >= 0 and (snapshot.on_host or snapshot.is_spare)
            lacking -= clean and self._may_go(snapshot)
        return lacking <= 0

    @property
    def has_host_room(self) -> bool:
        """Whether a snapshot could be copied out without leaving another one on the device alone."""
        idle = (one for one in self._live if one.place < 0 and not one.holds and not self._in_use(one))
        return bool(self._host_free) or any(idle)

    def add_host(self, snapshot: Snapshot) -> bool:
        """Give a snapshot of the device a place on the host, to be filled by a copy; False: there is none. Snapshots
        that are on the host alone go first for it."""
        if not self._make_host_room():
            return False
        snapshot.host = self._host_free.pop()
        return True

    def receive(self, block: Carrier | None) -> Snapshot | None:
        """A place on the host for the snapshot of `block`, which has none, to be filled by a transfer, which holds it;
        None: there is no place. Without a block it is a sequence's own, and goes when nothing uses it."""
        if block is not None and block.snapshot is not None:
            raise InvariantBroken(f"{block} has a snapshot already")
        if not self._make_host_room():
            return None
        snapshot = Snapshot(block, -1, -1)
        snapshot.on_device = False
        snapshot.host = self._host_free.pop()
        snapshot.holds = 1
        if block is not None:
            block.snapshot = snapshot
        self._use(snapshot)
        return snapshot

    def received(self, snapshot: Snapshot) -> None:
        """Its bytes on the host are whole; the transfer holds it yet."""
        snapshot.on_host = True

    def unhold(self, snapshot: Snapshot) -> None:
        """A transfer, or a request that waits, lets go of its place on the host."""
        snapshot.holds -= 1
        self._settle(snapshot)

    def _make_host_room(self) -> bool:
        if not self._host_free:
            idle = [one for one in self._live if one.on_host and not (one.moves or one.pins or one.holds)]
            victim = next((one for one in idle if one.place < 0), idle[0] if idle else None)
            if victim is None:
                return False
            self._leave_host(victim)
        return True

    def moved(self, snapshot: Snapshot) -> None:
        """A copy of it has ended; the caller has changed its marks."""
        self._settle(snapshot)

    def _leave_host(self, snapshot: Snapshot) -> None:
        self._host_free.append(snapshot.host)
        snapshot.host = -1
        snapshot.on_host = False
        if snapshot.place < 0:
            self.lost += 1
            self.drop(snapshot)

    # -- both ---------------------------------------------------------------------------------------

    def _use(self, snapshot: Snapshot) -> None:
        snapshot.passed = False
        self._live.pop(snapshot, None)
        self._live[snapshot] = None

    def _settle(self, snapshot: Snapshot) -> None:
        """Take back the places of a snapshot that no block has, as soon as nothing uses them."""
        if snapshot.block is not None or snapshot not in self._live or snapshot.holds or self._in_use(snapshot):
            return
        del self._live[snapshot]
        if snapshot.place >= 0:
            self._free.append(snapshot.place)
        if snapshot.host >= 0:
            self._host_free.append(snapshot.host)
        snapshot.place = snapshot.host = -1

    def check(self) -> None:
        """Raise InvariantBroken unless free places and snapshots are all there is, once each."""
        for name, free, total, held in (
            ("device", self._free, self.num_places, [one.place for one in self._live if one.place >= 0]),
            ("host", self._host_free, self.num_host_places, [one.host for one in self._live if one.host >= 0]),
        ):
            if sorted(free + held) != list(range(total)):
                raise InvariantBroken(f"free and live places of snapshots on the {name} do not add up")
        for snapshot in self._live:
            if snapshot.block is not None and snapshot.block.snapshot is not snapshot:
                raise InvariantBroken(f"{snapshot} has a block that does not know it")
            if snapshot.block is None and not (snapshot.holds or self._in_use(snapshot)):
                raise InvariantBroken(f"{snapshot} belongs to no block, and keeps its place")
            if not (snapshot.on_device or snapshot.on_host or snapshot.holds):
                raise InvariantBroken(f"{snapshot} is nowhere")
            if snapshot.awaited and (snapshot.block is None or snapshot.block.key is not None or snapshot.on_host):
                raise InvariantBroken(f"{snapshot} is awaited at the end of a block that is sealed or gone")
            if snapshot.on_device and snapshot.place < 0:
                raise InvariantBroken(f"{snapshot} is on the device, and has no place there")
            if snapshot.pins < 0 or snapshot.moves < 0 or snapshot.holds < 0:
                raise InvariantBroken(f"{snapshot} was given back twice")
