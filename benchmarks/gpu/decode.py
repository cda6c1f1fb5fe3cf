"""Decode and prefill by hand-driven steps: stretches, pairs, intervals, the floor.

A stretch begins with every context at its prompt's end and times steps from completion to completion, the first few
left out; nothing is compiled, captured or prefilled inside. Stretches of all ways take turns, and the order of turns
alternates. Every way is warmed up as long as it is measured, and Python's collector is told to leave what was loaded
alone. Used by `serving.py`, `hybrid.py` and `quantised.py`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.model import GREEDY, SAMPLED, TOP_P, Rig
from benchmarks.lib.report import Report, short

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Any

    from benchmarks.gpu.model import Arm
    from benchmarks.gpu.scale import Scale
    from benchmarks.lib.parts import Parts
    from fdasync.request import SamplerSpec


@dataclass(frozen=True)
class Way:
    """What is compared: an arm, steps in flight, how its sequences sample."""

    arm: Arm
    depth: int = 2
    sampler: SamplerSpec = GREEDY


@asynccontextmanager
async def opened(
    parts: Parts, scale: Scale, folder: str, arms: Sequence[str] = ("on",), suffix: str = ""
) -> AsyncIterator[Rig]:
    """A rig whose sequences are at their prompts' ends; the figure `prefill_tokens_per_s` with this suffix."""
    rig = await Rig.open(scale, folder, arms, parts.say)
    try:
        rates = await prefill(rig.arms["on"])
        if rates:
            parts.report.add(f"prefill_tokens_per_s{suffix}", rates)
        if "off" in arms:
            rig.arms["off"].select()
            await rig.arms["off"].prefill(range(scale.sizes[-1]), scale.context - scale.block_tokens)
        gc.collect()
        gc.freeze()
        yield rig
    finally:
        gc.unfreeze()
        await rig.close()


async def prefill(arm: Arm) -> list[float]:
    """Prefill all sequences of an arm; tokens per second, or nothing where the steps were too few."""
    scale = arm.scale
    ends: list[float] = []
    arm.select()
    keys = [
        range(first, min(first + scale.prefill_prompts, scale.sizes[-1]))
        for first in range(0, scale.sizes[-1], scale.prefill_prompts)
    ]
    following = iter(keys)
    await flights(lambda: arm.prefill(next(following), 0), 2, len(keys), lambda: ends.append(time.perf_counter()))
    # the first two warm up; single ends are seen late, as launching a prefill holds the loop for a while
    if len(ends) < 4:
        return []
    return [sum(map(len, keys[2:])) * scale.context / (ends[-1] - ends[1])]


async def flights(
    launch: Callable[[], asyncio.Future[Any]], depth: int, count: int, ended: Callable[[], object] = lambda: None
) -> None:
    """Launch so many steps, `depth` of them in flight; `ended` is called behind each."""
    pending: deque[asyncio.Future[Any]] = deque()
    for _ in range(count):
        if len(pending) == depth:
            await pending.popleft()
            ended()
        pending.append(launch())
    while pending:
        await pending.popleft()
        ended()


async def stretch(arm: Arm, depth: int, steps: int) -> float:
    """Seconds of `steps` decode steps after some others, with so many in flight."""
    ends: list[float] = []
    arm.select()
    arm.rewind()
    await flights(arm.decode, depth, arm.scale.lead + steps, lambda: ends.append(time.perf_counter()))
    return ends[-1] - ends[arm.scale.lead - 1]


async def turns(ways: dict[str, Way], count: int, pairs: int) -> dict[str, list[float]]:
    """Tokens per second of the stretches of each way, at `count` sequences."""
    for way in ways.values():
        await way.arm.shrink(count)
    scale = next(iter(ways.values())).arm.scale
    most = scale.most_steps - scale.lead - 1

    async def step_s(way: Way, steps: int) -> float:
        if way.arm.sampler != way.sampler:
            await way.arm.sample_by(way.sampler)
        return await stretch(way.arm, way.depth, steps) / steps

    steps = scale.trial
    if scale.seconds:
        trial_s = [await step_s(way, scale.trial) for way in ways.values()]
        steps = max(scale.trial, min(most, round(scale.seconds / min(trial_s))))
    for way in ways.values():  # as long as those that count, so that clocks and memory are where they will be
        await step_s(way, steps)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(pairs):
        for name in ways if turn % 2 == 0 else reversed(ways):
            rates[name].append(count / await step_s(ways[name], steps))
    return rates


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
    report.add(name, [middle])
    report.conditions[f"{name}_interval95"] = [short(low), short(high), len(ones)]


async def compare(rig: Rig, report: Report, count: int, copy_rate: float, others: Sequence[str] = ()) -> float:
    """Stretches of the way "on" at `count` sequences and of "off" and "depth1" where asked for; figures of all, and
    the floor. Returns seconds of a step of "on"."""
    ways = {"on": Way(rig.arms["on"])}
    if "off" in others:
        ways["off"] = Way(rig.arms["off"])
    if "depth1" in others:
        ways["depth1"] = Way(rig.arms["on"], depth=1)
    rates = await turns(ways, count, rig.scale.pairs)
    for name, values in rates.items():
        report.add(f"decode_tokens_per_s_{count}_{name}", values)
    for other, name in (("off", "capture_on_over_off"), ("depth1", "depth2_over_depth1")):
        if other in others:
            add_ratio(report, f"{name}_{count}", rates["on"], rates[other])
    step_s = count / statistics.median(rates["on"])
    report.add(f"step_ms_{count}", [step_s * 1e3])
    _floor(rig, report, count, step_s, copy_rate)
    return step_s


def _floor(rig: Rig, report: Report, count: int, step_s: float, copy_rate: float) -> None:
    """What the bytes of a step take at the rate of a copy, over what the step takes."""
    nbytes = rig.bytes.step(count, rig.scale.context)
    report.add(f"floor_ms_{count}", [nbytes / copy_rate * 1e3])
    report.add(f"floor_share_{count}", [nbytes / copy_rate / step_s])
    report.conditions[f"floor_{count}"] = {
        "gbytes": round(nbytes / 1e9, 3),
        "experts_expected_per_layer": round(statistics.mean(rig.bytes.expected(count)), 2),
        "experts_chosen_per_layer": round(rig.distinct_experts(count), 2),
    }


async def compare_samplers(rig: Rig, report: Report, count: int) -> None:
    """Sampled ways against the greedy one at `count` sequences."""
    on = rig.arms["on"]
    ways = {"greedy": Way(on), "sampled": Way(on, sampler=SAMPLED), "top_p": Way(on, sampler=TOP_P)}
    rates = await turns(ways, count, rig.scale.side_pairs)
    for name in ("sampled", "top_p"):
        add_ratio(report, f"{name}_over_greedy_{count}", rates[name], rates["greedy"])
    await on.sample_by(GREEDY)


async def compare_fixed(rig: Rig, report: Report, count: int) -> None:
    """Fixed numerics against the default at `count` sequences; sequences of the arm "fixed" come first where there are
    none."""
    fixed, scale = rig.arms["fixed"], rig.scale
    if not fixed.running:
        fixed.select()
        await fixed.prefill(range(count), scale.context - scale.block_tokens)
    rates = await turns({"on": Way(rig.arms["on"]), "fixed": Way(fixed)}, count, scale.pairs)
    add_ratio(report, f"fixed_over_default_{count}", rates["fixed"], rates["on"])


async def compare_fixed_prefill(rig: Rig, report: Report) -> None:
    """Steps of new prompts with fixed numerics against the default, in turns. All sequences leave."""
    scale = rig.scale
    keys = range(min(scale.prefill_prompts, scale.sizes[-1]))
    took: dict[str, list[float]] = {"on": [], "fixed": []}
    for name in took:
        await rig.arms[name].shrink(1)
    for turn in range(scale.side_pairs + 1):
        for name in took if turn % 2 == 0 else reversed(took):
            arm = rig.arms[name]
            arm.select()
            began = time.perf_counter()
            await arm.prefill(keys, 0, leaves=tuple(range(arm.running)))
            if turn:  # the first warms up
                took[name].append(len(keys) * scale.context / (time.perf_counter() - began))
    add_ratio(report, "prefill_fixed_over_default", took["fixed"], took["on"])


def copy_bytes_per_s(rig: Rig, report: Report) -> float:
    """Read plus written of one large copy on the device; the median of ten. Waits for the device."""
    device, nbytes = rig.device, rig.scale.copy_nbytes
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
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    del source, target
    torch.cuda.empty_cache()
    rate = 2 * nbytes / statistics.median(took)
    report.add("copy_gbps", [rate / 1e9])
    return rate
