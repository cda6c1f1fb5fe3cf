"""Decode and prefill of `gpu_serving` by hand-driven steps: stretches, pairs, intervals, the floor.

A stretch begins with every context at its prompt's end and times steps from completion to completion, the first few
left out; nothing is compiled, captured or prefilled inside. Stretches of all arms take turns, and the order of turns
alternates. Called by `serving.py`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.model import GREEDY, SAMPLED, TOP_P
from benchmarks.lib.report import Report, short

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from typing import Any

    from benchmarks.gpu.model import Arm, Rig
    from fdasync.request import SamplerSpec


@dataclass(frozen=True)
class Way:
    """What is compared: an arm, steps in flight, how its sequences sample."""

    arm: str
    depth: int = 2
    sampler: SamplerSpec = GREEDY


WAYS = {
    "on": Way("on"),
    "off": Way("off"),
    "fixed": Way("fixed"),
    "depth1": Way("on", 1),
    "sampled": Way("on", 2, SAMPLED),
    "top_p": Way("on", 2, TOP_P),
}


@dataclass(frozen=True)
class Found:
    """Of one number of sequences.

    Attributes:
        step_s: a step of the way "on", median.
        chosen: distinct experts of each layer in a step of it, mean over a stretch.
    """

    step_s: float
    chosen: list[float]


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


def add_ratio(
    report: Report, name: str, ones: Sequence[float], others: Sequence[float], aim: float | None = None
) -> None:
    """The ratio under a name, its interval in the conditions."""
    middle, low, high = ratio(ones, others)
    report.add(name, [middle], aim=aim)
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
        rate = sum(sizes[2:]) * scale.context / (ends[-1] - ends[1])
        report.add("prefill_tokens_per_s", [rate], aim=scale.aim("prefill_tokens_per_s"))
    if "off" in rig.arms:
        off = rig.arms["off"]
        off.select()
        await off.prefill(range(scale.sizes[-1]), scale.context - scale.block_tokens)


async def compare(rig: Rig, report: Report, ways: Sequence[str], count: int) -> Found:
    """Stretches of each way at `count` sequences, in turns; figures of them, and what the way "on" did."""
    scale = rig.scale
    rates, found = await _turns(rig, report, ways, count, scale.pairs)
    for way, values in rates.items():
        name = f"decode_tokens_per_s_{count}_{way}"
        report.add(name, values, aim=scale.aim(name))
    report.add(f"step_ms_{count}", [found.step_s * 1e3])
    if "off" in ways:
        for name in (f"capture_on_over_off_{count}", *(["capture_on_over_off"] if count == 64 else [])):
            add_ratio(report, name, rates["on"], rates["off"], scale.aim(name))
    if "depth1" in ways:
        name = f"depth2_over_depth1_{count}"
        add_ratio(report, name, rates["on"], rates["depth1"], scale.aim(name))
    return found


async def compare_samplers(rig: Rig, report: Report, count: int) -> None:
    """Sampled ways against the greedy one at `count` sequences."""
    rates, _ = await _turns(rig, report, ("on", "sampled", "top_p"), count, rig.scale.side_pairs, "_samplers")
    for way in ("sampled", "top_p"):
        report.add(f"decode_tokens_per_s_{count}_{way}", rates[way])
        name = f"{way}_over_greedy_{count}"
        add_ratio(report, name, rates[way], rates["on"], rig.scale.aim(name))
    await rig.arms["on"].sample_by(GREEDY)


async def compare_fixed(rig: Rig, report: Report, count: int) -> None:
    """Fixed numerics against the default at `count` sequences; sequences of the arm "fixed" come first where there are
    none."""
    fixed, scale = rig.arms["fixed"], rig.scale
    if not fixed.running:
        fixed.select()
        await fixed.prefill(range(count), scale.context - scale.block_tokens)
    rates, _ = await _turns(rig, report, ("on", "fixed"), count, scale.pairs, "_fixed")
    report.add(f"decode_tokens_per_s_{count}_fixed", rates["fixed"])
    add_ratio(report, f"fixed_over_default_{count}", rates["fixed"], rates["on"], 0.97)


async def compare_fixed_prefill(rig: Rig, report: Report) -> None:
    """Steps of new prompts with fixed numerics against the default, in turns. All sequences leave."""
    scale = rig.scale
    keys = range(min(scale.prefill_prompts, scale.sizes[-1]))
    took: dict[str, list[float]] = {"on": [], "fixed": []}
    for name in took:
        await rig.arms[name].shrink(1)
    for turn in range(scale.side_pairs + 1):
        for name in took if turn % 2 == 0 else reversed(list(took)):
            arm = rig.arms[name]
            arm.select()
            began = time.perf_counter()
            await arm.prefill(keys, 0, leaves=tuple(range(arm.running)))
            if turn:  # the first warms up
                took[name].append(len(keys) * scale.context / (time.perf_counter() - began))
    add_ratio(report, "prefill_fixed_over_default", took["fixed"], took["on"], 0.90)


async def skewed(rig: Rig, report: Report, count: int) -> Found:
    """The way "on" at `count` sequences, when the routers are skewed."""
    rates, found = await _turns(rig, report, ("on",), count, rig.scale.side_pairs, "_skewed")
    report.add(f"decode_tokens_per_s_{count}_skewed", rates["on"])
    report.add(f"step_ms_{count}_skewed", [found.step_s * 1e3])
    return found


async def _turns(
    rig: Rig, report: Report, ways: Sequence[str], count: int, pairs: int, suffix: str = ""
) -> tuple[dict[str, list[float]], Found]:
    """Tokens per second of each way's stretches."""
    scale = rig.scale
    for name in dict.fromkeys(WAYS[way].arm for way in ways):
        await rig.arms[name].shrink(count)
    steps = 2
    if scale.seconds:
        trial_s = [await _step_s(rig, way, scale.trial) for way in ways]
        steps = max(8, min(scale.most_steps - scale.lead - 1, round(scale.seconds / min(trial_s))))
    for way in ways:  # as long as those that count, so that clocks and memory are where they will be
        await _step_s(rig, way, steps)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    chosen: list[float] = []
    for turn in range(pairs):
        for way in ways if turn % 2 == 0 else tuple(reversed(ways)):
            rates[way].append(count / await _step_s(rig, way, steps))
            if way == "on" and turn == pairs - 1:
                chosen = rig.distinct_experts(count, steps)
    report.conditions[f"steps_per_stretch_{count}{suffix}"] = steps
    report.conditions[f"mean_context_{count}{suffix}"] = scale.context + scale.lead + steps / 2
    return rates, Found(count / statistics.median(rates["on"]), chosen)


async def _step_s(rig: Rig, name: str, steps: int) -> float:
    way = WAYS[name]
    arm = rig.arms[way.arm]
    if arm.sampler != way.sampler:
        await arm.sample_by(way.sampler)
    steps = min(steps, rig.scale.most_steps - rig.scale.lead - 1)
    return await stretch(arm, way.depth, rig.scale.lead, steps) / steps


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


def floor(rig: Rig, report: Report, found: dict[int, Found], rate: float) -> None:
    """What the bytes of a step take at the rate of a copy, over what the step takes: the experts that are expected
    where routing is uniform; in the conditions, those that were chosen too."""
    for count, one in sorted(found.items()):
        nbytes, by_chosen = (rig.bytes.step(count, rig.scale.context, chosen) for chosen in (None, one.chosen))
        report.add(f"floor_ms_{count}", [nbytes / rate * 1e3])
        name = f"floor_share_{count}"
        report.add(name, [nbytes / rate / one.step_s], aim=rig.scale.aim(name))
        report.conditions[f"floor_{count}"] = {
            "gbytes": round(nbytes / 1e9, 3),
            "experts_expected_per_layer": round(statistics.mean(rig.bytes.expected(count)), 2),
            **_of_chosen(one),
            "share_by_experts_chosen": round(by_chosen / rate / one.step_s, 4),
        }


def skewed_floor(rig: Rig, report: Report, found: dict[int, Found], rate: float) -> None:
    """The same where routers are skewed; the floor counts what was chosen."""
    for count, one in sorted(found.items()):
        nbytes = rig.bytes.step(count, rig.scale.context, one.chosen)
        report.add(f"experts_chosen_{count}_skewed", [statistics.mean(one.chosen)])
        report.add(f"floor_ms_{count}_skewed", [nbytes / rate * 1e3])
        report.add(f"floor_share_{count}_skewed", [nbytes / rate / one.step_s])
        report.conditions[f"floor_{count}_skewed"] = {"gbytes": round(nbytes / 1e9, 3), **_of_chosen(one)}


def _of_chosen(found: Found) -> dict[str, object]:
    return {
        "experts_chosen_per_layer": round(statistics.mean(found.chosen), 2),
        "experts_chosen_by_layer": [round(number, 1) for number in found.chosen],
    }
