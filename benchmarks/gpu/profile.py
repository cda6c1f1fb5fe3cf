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
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from benchmarks.gpu.model import Arm

_SENT = "Memcpy HtoD"
_FETCHED = "Memcpy DtoH"

IDLE = "idle between steps"
GAPS = "gaps inside the step"
SAMPLING = "sampling, staging of rows"
_GROUPED = "products of experts"
_GEMM = "other products"
# the first that matches has it; names of Triton's kernels are those of their functions
_GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("tables and layout", re.compile(r"^_step_layout|^_scatter_kernel")),
    (
        SAMPLING,
        re.compile(r"^_best|^_?(bias|bounds|chunk|clear|count|cut|draw|left|masses|narrow|peaks|penalise|slow_cut|stop)_kernel"),
    ),
    ("router and capture", re.compile(r"^_?route|^_write_ids|^_in_turn|^_product_kernel")),
    ("grouping and sum of experts", re.compile(r"^experts_(group|combine)")),
    (_GROUPED, re.compile(r"group_?problem|grouped|group_?gemm|^expert|moe", re.IGNORECASE)),
    (
        "fused norms, rotary, activations",
        re.compile(r"^_finish|^_prepare|^_angles|^_qkv|^_rms|^_norm|^_rota|^_gate"),
    ),
    ("attention", re.compile(r"^_decode|^_?join_|^_prefill|^_store|^_?latents|flash|fmha")),
    (_GEMM, re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|dot_kernel", re.IGNORECASE)),
    (
        "sort, index, scatter",
        re.compile(r"sort|radix|index|scatter|gather|hist|scan|bincount|search|bucket|::cub", re.IGNORECASE),
    ),
)  # fmt: skip
_REST = "element-wise, norms, copies"
_NAME_CHARS = 120
_MOST_KERNELS, _SHOWN = 60, 30


@dataclass(frozen=True)
class Event:
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Kernel:
    """What one kernel, copy or fill takes of a step.

    Attributes:
        name: cut to 120 characters; of several that are the same then, the sum.
        group: where most of its time counts.
        launches: a step, mean.
        us: a step, mean; time that two kernels share is the earlier one's.
        share: of the whole time.
    """

    name: str
    group: str
    launches: float
    us: float
    share: float


@dataclass(frozen=True)
class Breakdown:
    """Steps from the first kernel of one to the first of the next.

    Attributes:
        steps: how many were seen.
        step_us: median length.
        shares: of the whole time, by group; they add up to 1.
        idle_us: between two steps, median.
        launches: kernels, copies and fills of a step, mean.
        kernels: the largest first.
    """

    steps: int
    step_us: float
    shares: Mapping[str, float]
    idle_us: float
    launches: float
    kernels: Sequence[Kernel]


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
    # of a name: by group, and how often
    kernels: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    launches: defaultdict[str, int] = defaultdict(int)
    idles: list[float] = []
    lengths: list[float] = []
    for step, following in itertools.pairwise(steps):
        at = step[0].start
        for event, group in zip(step, _groups(step), strict=True):
            # time that two share is the earlier one's
            length = max(0.0, event.end - max(event.start, at))
            busy[group] += length
            kernels[event.name[:_NAME_CHARS]][group] += length
            launches[event.name[:_NAME_CHARS]] += 1
            at = max(at, event.end)
        idles.append(max(0.0, following[0].start - at))
        lengths.append(following[0].start - step[0].start)
    whole = sum(lengths)
    groups = [name for name, _ in _GROUPS if name != SAMPLING]
    shares = {group: busy[group] / whole for group in (*groups, _REST, SAMPLING)}
    shares[IDLE] = sum(idles) / whole
    shares[GAPS] = max(0.0, 1 - sum(shares.values()))
    table = [
        Kernel(
            name=name,
            group=max(parts, key=parts.__getitem__),
            launches=launches[name] / len(lengths),
            us=sum(parts.values()) / len(lengths),
            share=sum(parts.values()) / whole,
        )
        for name, parts in kernels.items()
    ]
    table.sort(key=lambda kernel: -kernel.us)
    count = sum(launches.values()) / len(lengths)
    return Breakdown(len(lengths), statistics.median(lengths), shares, statistics.median(idles), count, table)


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
    arm.select()
    arm.rewind()
    await _flights(arm.decode, depth, 4)
    return await _traced(lambda: _flights(arm.decode, depth, steps))


async def trace_prefills(arm: Arm, prompts: int, steps: int) -> list[Event]:
    """Steps that prefill so many new prompts each, two in flight, traced; their keys are those behind the running."""
    arm.select()
    arm.rewind()
    return await _traced(lambda: _flights(lambda: arm.prefill(range(arm.running, arm.running + prompts), 0), 2, steps))


async def _flights(launch: Callable[[], asyncio.Future[Any]], depth: int, count: int) -> None:
    flights: deque[asyncio.Future[Any]] = deque()
    for _ in range(count):
        if len(flights) == depth:
            await flights.popleft()
        flights.append(launch())
    while flights:
        await flights.popleft()


async def _traced(run: Callable[[], Awaitable[None]]) -> list[Event]:
    from torch.profiler import ProfilerActivity, profile

    # what was captured in graphs does not survive the tracer's leaving and coming again
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        await run()
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


def table_of(found: Breakdown) -> list[dict[str, object]]:
    """The kernels as JSON has them; the sum of the smallest is one row."""
    rows = [*found.kernels[:_MOST_KERNELS]]
    rest = found.kernels[_MOST_KERNELS:]
    if rest:
        sums = [sum(getattr(kernel, name) for kernel in rest) for name in ("launches", "us", "share")]
        rows.append(Kernel(f"{len(rest)} others", "", *sums))
    return [
        {
            "name": row.name,
            "group": row.group,
            "launches": round(row.launches, 2),
            "us": round(row.us, 2),
            "share": round(row.share, 5),
        }
        for row in rows
    ]


def show_kernels(step: str, found: Breakdown) -> None:
    """A table of the kernels of a step."""
    table = Table(title=f"Kernels of {step}: {found.launches:.0f}, {found.step_us:.0f} us, traced")
    for column in ("kernel", "group", "launches", "us", "share"):
        table.add_column(column, justify="left" if column in ("kernel", "group") else "right", no_wrap=True)
    for row in found.kernels[:_SHOWN]:
        table.add_row(row.name[:60], row.group, f"{row.launches:.1f}", f"{row.us:.1f}", f"{row.share:.2%}")
    Console(width=150).print(table)
