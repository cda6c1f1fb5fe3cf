"""How long a device is idle between decode steps, from a trace of torch.profiler: for `gpu_serving`.

A step begins behind the one copy from host to device that it makes. Results go to the host on a stream of their own:
those copies are left out, everything else is the compute stream's. Time between the last kernel of a step and the
first kernel of the next is idle (the copy of the step's inputs is in it, so this is the cautious reading). Works on
events, whoever recorded them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.decode import flights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.gpu.model import Arm

_SENT = "Memcpy HtoD"
_FETCHED = "Memcpy DtoH"


@dataclass(frozen=True)
class Event:
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Idle:
    """Of steps from the first kernel of one to the first of the next.

    Attributes:
        steps: how many were seen.
        step_us: median length; traced, so with the tracer's own cost.
        share: of the whole time in which nothing ran between two steps.
    """

    steps: int
    step_us: float
    share: float


def read_trace(path: str) -> list[Event]:
    """Kernels, copies and fills of a trace in Chrome's format, by their start."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    found = [
        Event(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda event: event.start)


def idle_of(events: Iterable[Event], last: int = 30) -> Idle:
    """Of the last steps but the very last, whose end is not seen. Raises ValueError where there are fewer than three.

    The first ones are not to be trusted: tracers lose events at their beginning.
    """
    steps: list[list[Event]] = []
    for event in events:
        if event.name.startswith(_SENT):
            steps.append([])
        elif steps and not event.name.startswith(_FETCHED):
            steps[-1].append(event)
    # of the first one there may be the second half only
    steps = [step for step in steps if step][1:][-last - 1 :]
    if len(steps) < 3:
        raise ValueError(f"the trace shows {len(steps)} whole steps")
    pairs = list(itertools.pairwise(steps))
    lengths = [following[0].start - step[0].start for step, following in pairs]
    idles = [max(0.0, following[0].start - max(event.end for event in step)) for step, following in pairs]
    return Idle(len(pairs), statistics.median(lengths), sum(idles) / sum(lengths))


async def trace(arm: Arm, depth: int, steps: int) -> list[Event]:
    """Decode steps of what runs in this arm, traced on the device."""
    from torch.profiler import ProfilerActivity, profile

    arm.select()
    arm.rewind()
    await flights(arm.decode, depth, 4)
    # what was captured in graphs does not survive the tracer's leaving and coming again
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        await flights(arm.decode, depth, steps)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        traced.export_chrome_trace(path)
        return read_trace(path)
