"""Decode and prefill of `gpu_serving` by hand-driven steps: stretches, pairs, intervals, the floor.

A stretch begins with every context at its prompt's end and times steps from completion to completion, the first few
left out; nothing is compiled, captured or prefilled inside. Stretches of all arms take turns, and the order of turns
alternates. Called by `gpu_serving.py`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks._report import Report, short

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from typing import Any

    from benchmarks._gpu_model import Arm, Rig

#: what is compared: arm, and steps in flight
WAYS = {"on": ("on", 2), "off": ("off", 2), "depth1": ("on", 1)}
_AIMS = {
    "capture_on_over_off": 0.998,
    "depth2_over_depth1_1": 1.0,
    "depth2_over_depth1_64": 1.0,
    "depth2_over_depth1_256": 1.0,
}


async def stretch(arm: Arm, depth: int, lead: int, steps: int) -> float:
    """Seconds of `steps` decode steps after `lead` others, with so many in flight."""
    arm.select()
    arm.rewind()
    flights: deque[asyncio.Future[Any]] = deque()
    began, done = time.perf_counter(), 0
    for _ in range(lead + steps):
        if len(flights) == depth:
            await flights.popleft()
            done += 1
            if done == lead:
                began = time.perf_counter()
        flights.append(arm.decode())
    while flights:
        await flights.popleft()
        done += 1
        if done == lead:
            began = time.perf_counter()
    return time.perf_counter() - began


def ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Of medians, and the ends of its 95 % interval: pairs drawn anew, with repetition."""
    a, b = np.asarray(ones), np.asarray(others)
    drawn = np.random.default_rng(0).integers(0, len(a), (5000, len(a)))
    spread = np.median(a[drawn], axis=1) / np.median(b[drawn], axis=1)
    low, high = np.percentile(spread, (2.5, 97.5))
    return float(np.median(a) / np.median(b)), float(low), float(high)


def add_ratio(report: Report, name: str, ones: Sequence[float], others: Sequence[float]) -> None:
    """The ratio under a name, its interval in the conditions."""
    middle, low, high = ratio(ones, others)
    report.add(name, [middle], aim=_AIMS.get(name))
    report.conditions[f"{name}_interval95"] = [short(low), short(high), len(ones)]


async def begin(rig: Rig, report: Report) -> None:
    """Prefill all sequences in the arm "on", timed, and let the other take them over with their last block anew."""
    scale = rig.scale
    on = rig.arms["on"]
    on.select()
    group = scale.prefill_prompts
    flights: deque[asyncio.Future[Any]] = deque()
    ends: list[float] = []
    sizes: list[int] = []
    for first in range(0, scale.sizes[-1], group):
        if len(flights) == 2:
            await flights.popleft()
            ends.append(time.perf_counter())
        keys = range(first, min(first + group, scale.sizes[-1]))
        sizes.append(len(keys))
        flights.append(on.prefill(keys, 0))
    while flights:
        await flights.popleft()
        ends.append(time.perf_counter())
    # the first two warm up; single ends are seen late, as launching a prefill holds the loop for a while
    if len(ends) > 3:
        report.add("prefill_tokens_per_s", [sum(sizes[2:]) * scale.context / (ends[-1] - ends[1])])
    if "off" in rig.arms:
        off = rig.arms["off"]
        off.select()
        await off.prefill(range(scale.sizes[-1]), scale.context - scale.block_tokens)


async def compare(rig: Rig, report: Report, ways: Sequence[str], count: int) -> float:
    """Stretches of each way at `count` sequences, in turns; figures of them. Seconds of a step of the way "on"."""
    scale = rig.scale
    for arm in rig.arms.values():
        await arm.shrink(count)
    steps = 2
    if scale.seconds:
        trial_s = [await _step_s(rig, way, scale.trial) for way in ways]
        steps = max(8, min(scale.most_steps - scale.lead - 1, round(scale.seconds / min(trial_s))))
    for way in ways:  # as long as those that count, so that clocks and memory are where they will be
        await _step_s(rig, way, steps)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(scale.pairs):
        for way in ways if turn % 2 == 0 else tuple(reversed(ways)):
            rates[way].append(count / await _step_s(rig, way, steps))
    report.conditions[f"steps_per_stretch_{count}"] = steps
    report.conditions[f"mean_context_{count}"] = scale.context + scale.lead + steps / 2
    for way, values in rates.items():
        report.add(f"decode_tokens_per_s_{count}_{way}", values)
    step_s = count / statistics.median(rates["on"])
    report.add(f"step_ms_{count}", [step_s * 1e3])
    if "off" in ways:
        add_ratio(report, f"capture_on_over_off_{count}", rates["on"], rates["off"])
        if count == 64:
            add_ratio(report, "capture_on_over_off", rates["on"], rates["off"])
    if "depth1" in ways:
        add_ratio(report, f"depth2_over_depth1_{count}", rates["on"], rates["depth1"])
    return step_s


async def _step_s(rig: Rig, way: str, steps: int) -> float:
    arm, depth = WAYS[way]
    steps = min(steps, rig.scale.most_steps - rig.scale.lead - 1)
    return await stretch(rig.arms[arm], depth, rig.scale.lead, steps) / steps


def copy_bytes_per_s(device: torch.device, nbytes: int) -> float:
    """Read plus written of one large copy on the device; the median of ten. Waits for the device."""
    while True:
        try:
            source = torch.empty(nbytes, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            break
        except torch.cuda.OutOfMemoryError:
            nbytes //= 2
    source.zero_()
    took = []
    for turn in range(12):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            target.copy_(source)
            ended.record()
            ended.synchronize()
            seconds = float(began.elapsed_time(ended)) / 1e3
        else:
            started = time.perf_counter()
            target.copy_(source)
            seconds = time.perf_counter() - started
        if turn > 1:
            took.append(seconds)
    return 2 * nbytes / statistics.median(took)


def floor(rig: Rig, report: Report, steps_s: dict[int, float]) -> None:
    """What the bytes of a step take at the rate of a copy, over what the step takes."""
    rate = copy_bytes_per_s(rig.device, rig.scale.copy_nbytes)
    report.add("copy_gbps", [rate / 1e9])
    for count, step_s in sorted(steps_s.items()):
        nbytes = rig.floor_nbytes(count)
        chosen = rig.distinct_experts(count)
        report.add(f"floor_ms_{count}", [nbytes / rate * 1e3])
        report.add(f"floor_share_{count}", [nbytes / rate / step_s])
        report.conditions[f"floor_{count}"] = {
            "gbytes": round(nbytes / 1e9, 3),
            "experts_chosen_per_layer": round(chosen, 2),
            "share_by_experts_chosen": round(rig.floor_nbytes(count, chosen) / rate / step_s, 4),
        }
