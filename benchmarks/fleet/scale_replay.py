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
import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from fdasync_fleet.link.session import NUMBERS_OF, PAIR_NBYTES
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.testing.sim.network import SimNetwork, SimPipe

from benchmarks.fleet.scale_meter import Meter, MeteredLoop, MeteredRouter, MeteredWire
from fdasync.errors import FdasyncError
from fdasync.testing.sim.loop import run_sim
from fdasync.testing.sim.process import SimProcess

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from fdasync_fleet.link.wire import Frame, Pipe

    from fdasync.request import SamplingParams
    from fdasync.result import Result

ROUTER = RouterConfig(require="all", connect_s=60.0)


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
        addresses: of the router, whose seed is 0.
        incarnation: of the router's process.
        got: in order.
        sent: numbered messages by the address that they were sent to.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.incarnation = b""
        self.got: list[Got] = []
        self.sent: Counter[str] = Counter()


async def ask(
    router: MeteredRouter, prompt: array[int], params: SamplingParams, deadline_s: float, *, streams: bool = False
) -> tuple[str, Result | None]:
    """How a call ended, by the name of its reason or error, and its result. `streams`: its caller reads each delta."""
    try:
        if streams:
            async with router.generate(prompt, params, deadline_s=deadline_s) as stream:
                async for _ in stream:
                    pass
            result = stream.result
        else:
            result = await router.complete(prompt, params, deadline_s=deadline_s)
    except FdasyncError as error:
        return type(error).__name__, None
    return str(result.samples[0].finish_reason), result


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


class _ToldWire(MeteredWire):
    """A wire on which nobody is: what arrives is told, and what is sent is counted."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__(SimNetwork(random.Random(0)), process)
        self.sent: Counter[str] = Counter()
        self._dialed: dict[str, SimPipe] = {}

    def dial(self, address: str) -> Pipe:
        pipe = self._dialed[address] = SimPipe(self, address)
        return pipe

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        self.meter.away(_count, self.sent, pipe, frames)
        return True

    def tell(self, got: Got) -> None:
        pipe = self._dialed.get(got.address)
        if pipe is None or pipe.closed:
            return
        if got.frames is None:
            self.on_room(pipe)
        else:
            self.on_frames(pipe, list(got.frames))


def replay(recording: Recording) -> tuple[Meter, Counter[str]]:
    """A router gets what was recorded, at the same times: its CPU from the first request on, and how calls ended.

    Raises RuntimeError where it sent an instance more messages than the recorded router did, or less.
    """
    meter = Meter()
    process = SimProcess("alone")
    meter.watched.add(process)
    loop = MeteredLoop(meter)

    async def main() -> Counter[str]:
        wire = _ToldWire(process)
        wire.meter = meter
        router = MeteredRouter(recording.addresses, ROUTER, wire=wire, seed=0)
        router.meter = meter
        # it has the incarnation that frames and names of requests have in them
        with mock.patch("fdasync_fleet.link.links.os.urandom", lambda count: recording.incarnation[1 : 1 + count]):
            starting = process.start(router.start(), "start")
            await asyncio.sleep(0)
        calls: set[asyncio.Task[tuple[str, Result | None]]] = set()
        ends: Counter[str] = Counter()

        def ended(task: asyncio.Task[tuple[str, Result | None]]) -> None:
            calls.discard(task)
            ends[task.result()[0]] += 1  # of a task that is done

        # what was recorded is no object of a router
        gc.collect()
        gc.freeze()
        try:
            for got in recording.got:
                if got.when > loop.time():
                    await asyncio.sleep(got.when - loop.time())
                if got.call is None:
                    wire.tell(got)
                    continue
                if not starting.done():
                    await starting
                    meter.ns.clear()
                    loop.metered_gc()
                task = process.start(ask(router, *got.call), "complete")
                calls.add(task)
                task.add_done_callback(ended)
            if calls:
                await asyncio.wait(calls)
        finally:
            gc.unfreeze()
            await process.start(router.aclose(), "close")
        if wire.sent != recording.sent:
            raise RuntimeError("the router that is alone did not send the same")
        return ends

    return meter, run_sim(main(), loop)
