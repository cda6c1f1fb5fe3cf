"""Plays once more, to a router that is alone, what a router of a simulated fleet got: frames and calls at their times.

In the simulation the instances' steps run between a router's callbacks, on its core, and their data takes its caches;
rounds of the garbage collector go over their objects. A router has a core and a process of its own. So `Recording`
keeps what a router got, and `replay` gives the same to a fresh one while nothing else runs: it decides the same, which
the number of frames to each instance shows, and its CPU is its own.

Knows no instances and no figures. `scale_world.py` records, `fleet_scale.py` replays.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fdasync_fleet.link.session import NUMBERS_OF, PAIR_NBYTES, PROCESS_NBYTES, SESSION_NBYTES
from fdasync_fleet.link.wire import Pipe, Wire

from benchmarks.fleet.scale_meter import Meter, MeteredLoop, MeteredRouter, MeteredWire
from fdasync.errors import FdasyncError
from fdasync.testing.sim.loop import run_sim
from fdasync.testing.sim.process import SimProcess

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from fdasync_fleet.link.session import LinkConfig
    from fdasync_fleet.link.wire import Frame
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.testing.sim.network import SimNetwork

    from fdasync.request import SamplingParams

# request names begin with so many bytes of their router's incarnation, in hex
_BASE_NBYTES = 8


class Got(NamedTuple):
    """Attributes:
    when: time.
    address: of the other side; "" with a call.
    frames: None: the other side has room again.
    call: prompt, parameters and deadline of a call.
    """

    when: float
    address: str = ""
    frames: list[bytes] | None = None
    call: tuple[array[int], SamplingParams, float] | None = None


class Recording:
    """What one router got, and what it did.

    Attributes:
        incarnation: of the router's process.
        got: in order.
        sent: numbered messages by the address that they were sent to.
        addresses, config, seed: of the router.
    """

    def __init__(self, addresses: list[str], config: RouterConfig, seed: int) -> None:
        self.addresses, self.config, self.seed = addresses, config, seed
        self.incarnation = b""
        self.got: list[Got] = []
        self.sent: Counter[str] = Counter()

    def call(self, prompt: array[int], params: SamplingParams, deadline_s: float) -> None:
        now = asyncio.get_running_loop().time()
        self.got.append(Got(now, call=(prompt, params, deadline_s)))

    def told_to(self, incarnation: bytes) -> list[Got]:
        """What was got, as a router of another incarnation must get it."""
        old, new = self.incarnation, incarnation
        base, new_base = old[:_BASE_NBYTES].hex().encode(), new[:_BASE_NBYTES].hex().encode()

        def renamed(frame: bytes) -> bytes:
            at = slice(SESSION_NBYTES, SESSION_NBYTES + PROCESS_NBYTES)
            if frame[at] == old[:PROCESS_NBYTES]:
                frame = frame[: at.start] + new[:PROCESS_NBYTES] + frame[at.stop :]
            return frame.replace(base, new_base)

        return [
            got if got.frames is None else got._replace(frames=[renamed(got.frames[0]), *got.frames[1:]])
            for got in self.got
        ]


def _count(sent: Counter[str], pipe: Pipe, frames: list[Frame]) -> None:
    if NUMBERS_OF(frames[0], PAIR_NBYTES)[0]:
        sent[pipe.address] += 1


class RecordingWire(MeteredWire):
    """The wire of a router that is recorded."""

    def __init__(self, network: SimNetwork, process: SimProcess, recording: Recording) -> None:
        super().__init__(network, process)
        self.recording = recording

    def open(
        self, name: bytes, on_frames: Callable[[Pipe, list[Frame]], None], on_room: Callable[[Pipe], None]
    ) -> None:
        self.recording.incarnation = name
        loop, got = asyncio.get_running_loop(), self.recording.got

        def frames_came(pipe: Pipe, frames: list[Frame]) -> None:
            self.meter.away(lambda: got.append(Got(loop.time(), pipe.address, [*map(bytes, frames)])))
            on_frames(pipe, frames)

        def room_came(pipe: Pipe) -> None:
            self.meter.away(lambda: got.append(Got(loop.time(), pipe.address)))
            on_room(pipe)

        super().open(name, frames_came, room_came)

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        self.meter.away(_count, self.recording.sent, pipe, frames)
        return super().send(pipe, frames)


class _ToldWire(Wire):
    """A wire on which nobody is: what arrives is told, and what is sent is counted."""

    def __init__(self, process: SimProcess, meter: Meter) -> None:
        self.sent: Counter[str] = Counter()
        self.name = b""
        self._process = process
        self._meter = meter
        self._pipes: dict[str, Pipe] = {}

    def open(
        self, name: bytes, on_frames: Callable[[Pipe, list[Frame]], None], on_room: Callable[[Pipe], None]
    ) -> None:
        self.name = name
        self._on_frames, self._on_room = on_frames, on_room

    def listen(self, address: str) -> str:
        return address

    def dial(self, address: str) -> Pipe:
        return self._pipes.setdefault(address, Pipe(address))

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        self._meter.away(_count, self.sent, pipe, frames)
        return True

    def hang_up(self, pipe: Pipe) -> None:
        self._pipes.pop(pipe.address, None)

    async def aclose(self) -> None:
        self._pipes.clear()

    def tell(self, got: Got) -> None:
        pipe = self._pipes.get(got.address)
        if pipe is not None and got.frames is None:
            self._process.call(self._on_room, pipe)
        elif pipe is not None:
            self._process.call(self._on_frames, pipe, got.frames)


class Replayed(NamedTuple):
    """Attributes:
    meter: CPU from the first request on.
    calls: how calls ended, by the name of their reason or error.
    same: as many messages went to each instance as the recorded router sent it.
    """

    meter: Meter
    calls: Counter[str]
    same: bool

    @property
    def us(self) -> float:
        """CPU for each request, with all rounds of the garbage collector."""
        return sum(self.meter.ns.values()) / 1000 / max(self.calls.total(), 1)


def replay(recording: Recording, links: LinkConfig) -> Replayed:
    """A router gets what was recorded, at the same times."""
    meter = Meter()
    process = SimProcess("alone")
    meter.watch(process)
    loop = MeteredLoop(meter)

    async def main() -> Replayed:
        wire = _ToldWire(process, meter)
        router = MeteredRouter(recording.addresses, recording.config, links=links, wire=wire, seed=recording.seed)
        router.meter = meter
        starting = process.start(router.start(), "start")
        await asyncio.sleep(0)
        told = recording.told_to(wire.name)
        calls: set[asyncio.Task[str]] = set()
        ends: Counter[str] = Counter()

        async def call(prompt: array[int], params: SamplingParams, deadline_s: float) -> str:
            try:
                result = await router.complete(prompt, params, deadline_s=deadline_s)
            except FdasyncError as error:
                return type(error).__name__
            return str(result.samples[0].finish_reason)

        def ended(task: asyncio.Task[str]) -> None:
            calls.discard(task)
            ends[task.result()] += 1  # of a task that is done

        # what was recorded is no object of a router
        gc.collect()
        gc.freeze()
        try:
            for got in told:
                if got.when > loop.time():
                    await asyncio.sleep(got.when - loop.time())
                if got.call is None:
                    wire.tell(got)
                    continue
                if not starting.done():
                    await starting
                    meter.reset()
                    loop.metered_gc()
                task = process.start(call(*got.call), "complete")
                calls.add(task)
                task.add_done_callback(ended)
            if calls:
                await asyncio.wait(calls)
        finally:
            gc.unfreeze()
            await process.start(router.aclose(), "close")
        return Replayed(meter, ends, wire.sent == recording.sent)

    return run_sim(main(), loop)
