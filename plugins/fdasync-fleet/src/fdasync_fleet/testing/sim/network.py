"""A network in one process and in virtual time, with conditions that a test sets; the same from the same seed.

`SimNetwork(random.Random(seed)).wire("a")` is a `Wire` for `Links`. Between two wires frames take a while, and may be
lost, come twice or out of order; two wires can be parted; a wire can be killed (its process died) or frozen (SIGSTOP).

Frames are delivered by `loop.call_later`; run it under `run_sim`. Knows no messages. Called by tests and `process.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import ConfigError
from fdasync_fleet.link.wire import Pipe, Wire

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from fdasync_fleet.link.wire import Frame


class NetworkConditions(msgspec.Struct, frozen=True, kw_only=True):
    """How a network treats frames.

    Attributes:
        delay_s: least and most seconds that a frame takes.
        drop: probability that a frame is lost.
        duplicate: probability that a frame comes twice.
        reorder: probability that a frame may overtake earlier frames of its pipe; other frames never do.
        room: frames on their way on one pipe; `send` refuses more.
    """

    delay_s: tuple[float, float] = (0.0001, 0.001)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    room: int = 1000


class SimPipe(Pipe):
    """One end of a connection.

    Attributes:
        wire: of this end.
        other: the end at the other wire; None before the first frame.
        closed: this end was hung up.
        on_the_way: frames that were sent here and have not arrived.
        refused: a `send` was refused, so `on_room` is due.
        latest: arrival time of the last frame that was not reordered.
    """

    __slots__ = ("closed", "latest", "on_the_way", "other", "refused", "wire")

    def __init__(self, wire: SimWire, address: str) -> None:
        super().__init__(address)
        self.wire = wire
        self.other: SimPipe | None = None
        self.closed = False
        self.on_the_way = 0
        self.refused = False
        self.latest = 0.0


class SimNetwork:
    """See the module.

    Attributes:
        conditions: between wires without conditions of their own (`between`). May be changed at any time.
        delivered, lost: frames so far.
    """

    def __init__(self, rng: random.Random, conditions: NetworkConditions | None = None) -> None:
        self.conditions = conditions or NetworkConditions()
        self.delivered = 0
        self.lost = 0
        self._rng = rng
        self._between: dict[frozenset[SimWire], NetworkConditions] = {}
        self._parted: set[frozenset[SimWire]] = set()
        self._listeners: dict[str, SimWire] = {}
        self._ports = 40_000

    def wire(self, name: str) -> SimWire:
        """The wire of another process; the name is for people."""
        return SimWire(self, name)

    def between(self, one: SimWire, other: SimWire, conditions: NetworkConditions) -> None:
        """Set the conditions between these two wires from now on."""
        self._between[frozenset((one, other))] = conditions

    def partition(self, one: SimWire, other: SimWire) -> None:
        """Frames between these two vanish until `heal`, frames on their way included."""
        self._parted.add(frozenset((one, other)))

    def heal(self, one: SimWire, other: SimWire) -> None:
        self._parted.discard(frozenset((one, other)))

    def kill(self, wire: SimWire) -> None:
        """End the wire as if its process died: later frames from it vanish, and all frames to it. Its address is free.

        Frames that it sent before still arrive. Its owner does not notice; the wires that it dialed do when they send.
        """
        wire.dead = True
        self.release(wire)

    def freeze(self, wire: SimWire) -> None:
        """Stop the wire as if its process stood still: frames from it and to it wait for `thaw`."""
        wire.frozen = True

    def thaw(self, wire: SimWire) -> None:
        wire.frozen = False
        held, wire.held = wire.held, []
        for each in held:
            asyncio.get_running_loop().call_soon(each)

    # -- for wires ----------------------------------------------------------------------------

    def claim(self, wire: SimWire, address: str) -> str:
        if not address.startswith(("ipc://", "tcp://127.0.0.1:")):
            raise ConfigError("address", f"{address!r} is no ipc or loopback address")
        if address.endswith((":0", ":*")):
            self._ports += 1
            address = f"tcp://127.0.0.1:{self._ports}"
        if address in self._listeners:
            raise ConfigError("address", f"a process listens at {address!r} already")
        self._listeners[address] = wire
        return address

    def release(self, wire: SimWire) -> None:
        self._listeners = {address: each for address, each in self._listeners.items() if each is not wire}

    def carry(self, pipe: SimPipe, frames: list[Frame]) -> bool:
        """Send from this end; see `Wire.send`."""
        if pipe.closed or pipe.wire.dead:
            return True
        target = self._target(pipe)
        if pipe.other is not None and not pipe.address:
            pipe.is_cut = pipe.other.closed or pipe.other.wire.dead
        conditions = self._between.get(frozenset((pipe.wire, target)), self.conditions) if target else self.conditions
        if pipe.on_the_way >= conditions.room:
            pipe.refused = True
            return False
        if pipe.wire.frozen:
            pipe.wire.held.append(lambda: self._carry_late(pipe, frames))
            return True
        rng = self._rng
        copies = 0 if rng.random() < conditions.drop else 2 if rng.random() < conditions.duplicate else 1
        if not copies:
            self.lost += 1
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            when = loop.time() + rng.uniform(*conditions.delay_s)
            if rng.random() >= conditions.reorder:
                when = pipe.latest = max(when, pipe.latest)
            pipe.on_the_way += 1
            loop.call_at(when, self._arrive, pipe, [bytes(frame) for frame in frames])
        return True

    def _carry_late(self, pipe: SimPipe, frames: list[Frame]) -> None:
        if not self.carry(pipe, frames):
            self.lost += 1

    def _target(self, pipe: SimPipe) -> SimWire | None:
        """The wire at the other end now: a process that replaced another gets the other's frames."""
        return self._listeners.get(pipe.address) if pipe.address else pipe.other.wire if pipe.other else None

    def _arrive(self, pipe: SimPipe, frames: list[bytes]) -> None:
        pipe.on_the_way -= 1
        if pipe.refused and not pipe.closed and not pipe.wire.dead:
            pipe.refused = False
            asyncio.get_running_loop().call_soon(pipe.wire.on_room, pipe)
        target = self._target(pipe)
        if target is None or target.dead or frozenset((pipe.wire, target)) in self._parted:
            self.lost += 1
        elif target.frozen:
            target.held.append(lambda: self._deliver(pipe, target, frames))
        else:
            self._deliver(pipe, target, frames)

    def _deliver(self, pipe: SimPipe, target: SimWire, frames: list[bytes]) -> None:
        if target.dead or target.closed:
            self.lost += 1
            return
        other = pipe.other
        if pipe.address and (other is None or other.closed or other.wire is not target):
            other = pipe.other = SimPipe(target, "")
            other.other = pipe
        if other is None or other.closed:
            self.lost += 1
            return
        self.delivered += 1
        target.on_frames(other, list(frames))


class SimWire(Wire):
    """A process's place in a `SimNetwork`. Compared by identity.

    Attributes:
        name: for people.
        dead, frozen, closed: it was killed, frozen, or closed by its owner.
        held: deliveries and sends that wait for `thaw`.
        on_frames: the owner's callback.
    """

    def __init__(self, network: SimNetwork, name: str) -> None:
        self.name = name
        self.dead = self.frozen = self.closed = False
        self.held: list[Callable[[], None]] = []
        self._network = network
        self._pipes: list[SimPipe] = []
        self._room: Callable[[Pipe], None]
        self.on_frames: Callable[[Pipe, list[Frame]], None]

    def __repr__(self) -> str:
        return f"<SimWire {self.name}>"

    def open(
        self, name: bytes, on_frames: Callable[[Pipe, list[Frame]], None], on_room: Callable[[Pipe], None]
    ) -> None:
        del name
        self.on_frames, self._room = on_frames, on_room

    def on_room(self, pipe: SimPipe) -> None:
        if not pipe.closed and not self.closed and not self.dead:
            self._room(pipe)

    def listen(self, address: str) -> str:
        return self._network.claim(self, address)

    def dial(self, address: str) -> Pipe:
        pipe = SimPipe(self, address)
        self._pipes.append(pipe)
        asyncio.get_running_loop().call_soon(self.on_room, pipe)
        return pipe

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        assert isinstance(pipe, SimPipe)
        return self.closed or self._network.carry(pipe, frames)

    def hang_up(self, pipe: Pipe) -> None:
        assert isinstance(pipe, SimPipe)
        pipe.closed = True

    async def aclose(self) -> None:
        self.closed = True
        self.held.clear()
        for pipe in self._pipes:
            pipe.closed = True
        self._network.release(self)
