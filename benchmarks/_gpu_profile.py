"""Where a decode step's device time goes, from a trace of torch.profiler: for `gpu_serving`.

A step begins behind the one copy from host to device that it makes. Results go to the host on a stream of their own:
those copies are left out, everything else is the compute stream's. Time between the last kernel of a step and the
first kernel of the next is idle (the copy of the step's inputs is in it, so this is the cautious reading); other time
in which nothing runs is a gap inside the step. Tracing may stretch the gaps inside a graph, so shares of busy time are
truer than those of gaps: the traced and the untraced length of a step stand beside each other in the conditions.
Works on events, whoever recorded them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import tempfile
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks._gpu_model import Arm

_SENT = "Memcpy HtoD"
_FETCHED = "Memcpy DtoH"

IDLE = "idle between steps"
GAPS = "gaps inside the step"
SAMPLING = "sampling, staging of rows"
_GROUPED = "grouped GEMMs of experts"
_GEMM = "other GEMMs"
# the first that matches has it; names of Triton's kernels are those of their functions
_GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("tables and layout", re.compile(r"^_step_layout|^_scatter_kernel")),
    ("attention", re.compile(r"^_decode|^_join|^_prefill|^_store|flash|fmha")),
    ("router and capture", re.compile(r"^_route|^_write_ids")),
    (_GROUPED, re.compile(r"group_?problem|grouped|group_?gemm|^_expert|moe", re.IGNORECASE)),
    (_GEMM, re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|dot_kernel", re.IGNORECASE)),
    (
        "sort, index, scatter of grouping",
        re.compile(r"sort|radix|index|scatter|gather|hist|scan|bincount|search|bucket|::cub", re.IGNORECASE),
    ),
)  # fmt: skip
_REST = "element-wise, norms, copies"


@dataclass(frozen=True)
class Event:
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Steps from the first kernel of one to the first of the next.

    Attributes:
        steps: how many were seen.
        step_us: median length.
        shares: of the whole time, by group; they add up to 1.
        idle_us: between two steps, median.
        kernels: share of the whole time by kernel, the largest first.
    """

    steps: int
    step_us: float
    shares: Mapping[str, float]
    idle_us: float
    kernels: Sequence[tuple[str, float]]


def read_trace(path: str) -> list[Event]:
    """Kernels, copies and fills of a trace in Chrome's format, by their start."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    found = [
        Event(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda event: event.start)


def break_down(events: Iterable[Event], last: int = 30) -> Breakdown:
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
    busy: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, float] = defaultdict(float)
    idles: list[float] = []
    lengths: list[float] = []
    for step, following in itertools.pairwise(steps):
        at = step[0].start
        for event, group in zip(step, _groups(step), strict=True):
            # time that two share is the earlier one's
            length = max(0.0, event.end - max(event.start, at))
            busy[group] += length
            kernels[event.name] += length
            at = max(at, event.end)
        idles.append(max(0.0, following[0].start - at))
        lengths.append(following[0].start - step[0].start)
    whole = sum(lengths)
    shares = {group: busy[group] / whole for group in (*[name for name, _ in _GROUPS], _REST, SAMPLING)}
    shares[IDLE] = sum(idles) / whole
    shares[GAPS] = max(0.0, 1 - sum(shares.values()))
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:15]
    named = [(name[:120], time / whole) for name, time in longest]
    return Breakdown(len(lengths), statistics.median(lengths), shares, statistics.median(idles), named)


def _groups(step: Sequence[Event]) -> list[str]:
    groups = [next((name for name, pattern in _GROUPS if pattern.search(event.name)), _REST) for event in step]
    # behind the product that makes the logits nothing but sampling and the staging of rows is left
    products = [number for number, group in enumerate(groups) if group in (_GEMM, _GROUPED)]
    if products:
        last = products[-1] + 1
        groups[last:] = [SAMPLING] * (len(groups) - last)
    return groups


async def trace(arm: Arm, depth: int, steps: int) -> list[Event]:
    """Decode steps of what runs in this arm, traced on the device."""
    from torch.profiler import ProfilerActivity, profile

    # what was captured in graphs does not survive the tracer's leaving and coming again
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    arm.select()
    arm.rewind()
    flights: deque[asyncio.Future[Any]] = deque()

    async def run(count: int) -> None:
        for _ in range(count):
            if len(flights) == depth:
                await flights.popleft()
            flights.append(arm.decode())
        while flights:
            await flights.popleft()

    await run(4)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        await run(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        traced.export_chrome_trace(path)
        return read_trace(path)


def show(count: int, breakdowns: Mapping[int, Breakdown]) -> None:
    """A table of the shares at `count` sequences, a column for each depth."""
    table = Table(title=f"Device time of a decode step of {count}, traced")
    table.add_column("share of")
    for depth, found in breakdowns.items():
        table.add_column(f"depth {depth}: {found.step_us:.0f} us", justify="right")
    for group in next(iter(breakdowns.values())).shares:
        table.add_row(group, *[f"{found.shares[group]:.2%}" for found in breakdowns.values()])
    Console(width=100).print(table)
