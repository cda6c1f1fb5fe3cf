"""A network in one process and in virtual time, as bad as a test wants it; the same from the same seed.

`SimNetwork(random.Random(seed)).wire("a")` is a `Wire` for `Links`. Between two wires frames take a while, and may be
lost, come twice or out of order; two wires can be parted; a wire can be killed (its process died) or frozen (SIGSTOP).

Frames are delivered by `loop.call_later`; run it under `run_sim`. Called by tests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import ConfigError
from fdasync.pd.link.wire import Pipe, Wire

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from fdasync.pd.link.wire import Frame


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """How a network treats frames.

    Attributes:
        delay_s: least and most that a frame takes.
        drop, duplicate, reorder: probabilities. A frame that is not reordered never overtakes another of its pipe.
        room: frames on their way on one pipe; `send` refuses more.
    """

    delay_s: tuple[float, float] = (0.0001, 0.001)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    room: int = 1000


class SimPipe(Pipe):
    """One end. `other` is the end at the other wire, where there is one."""

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
        weather: between wires for which `between` says nothing else. May be changed at any time.
        delivered, lost: frames so far.
    """

    def __init__(self, rng: random.Random, weather: Weather | None = None) -> None:
        self.weather = weather or Weather()
        self.delivered = 0
        self.lost = 0
        self._rng = rng
        self._between: dict[frozenset[SimWire], Weather] = {}
        self._parted: set[frozenset[SimWire]] = set()
        self._listeners: dict[str, SimWire] = {}
        self._ports = 40_000

    def wire(self, name: str) -> SimWire:
        """Another process; the name is for people."""
        return SimWire(self, name)

    def between(self, one: SimWire, other: SimWire, weather: Weather) -> None:
        """The weather between these two, from now on."""
        self._between[frozenset((one, other))] = weather

    def partition(self, one: SimWire, other: SimWire) -> None:
        """Frames between these two vanish, also those on their way, until `heal`."""
        self._parted.add(frozenset((one, other)))

    def heal(self, one: SimWire, other: SimWire) -> None:
        self._parted.discard(frozenset((one, other)))

    def kill(self, wire: SimWire) -> None:
        """Its process died: what it sends from now on vanishes, and so does what was sent to it. Its address is free.

        What it sent before still arrives. Whoever owns it does not notice; those whom it dialed do when they send.
        """
        wire.dead = True
        self.release(wire)

    def freeze(self, wire: SimWire) -> None:
        """Its process stands still: what it would send, and what arrives, waits for `thaw`."""
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
            raise ConfigError("address", f"somebody listens at {address!r} already")
        self._listeners[address] = wire
        return address

    def release(self, wire: SimWire) -> None:
        self._listeners = {address: each for address, each in self._listeners.items() if each is not wire}

    def carry(self, pipe: SimPipe, frames: list[Frame]) -> bool:
        """Send from this end; as `Wire.send`."""
        if pipe.closed or pipe.wire.dead:
            return True
        target = self._target(pipe)
        if pipe.other is not None and not pipe.address:
            pipe.is_cut = pipe.other.closed or pipe.other.wire.dead
        weather = self._between.get(frozenset((pipe.wire, target)), self.weather) if target else self.weather
        if pipe.on_the_way >= weather.room:
            pipe.refused = True
            return False
        if pipe.wire.frozen:
            pipe.wire.held.append(lambda: self._carry_late(pipe, frames))
            return True
        rng = self._rng
        copies = 0 if rng.random() < weather.drop else 2 if rng.random() < weather.duplicate else 1
        if not copies:
            self.lost += 1
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            when = loop.time() + rng.uniform(*weather.delay_s)
            if rng.random() >= weather.reorder:
                when = pipe.latest = max(when, pipe.latest)
            pipe.on_the_way += 1
            loop.call_at(when, self._arrive, pipe, [bytes(frame) for frame in frames])
        return True

    def _carry_late(self, pipe: SimPipe, frames: list[Frame]) -> None:
        if not self.carry(pipe, frames):
            self.lost += 1

    def _target(self, pipe: SimPipe) -> SimWire | None:
        """Whoever is there now: a process that came in place of another gets what was sent to that one."""
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
        dead, frozen, closed: what happened to it.
        held: what waits until it thaws.
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
