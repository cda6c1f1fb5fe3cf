"""Whole engines of the GPU benchmarks: rounds of requests, replies with and without routing, the engine's own cost.

The model in a worker process, two steps in flight, prefix cache on, no host tier. Every round sends the same prompts
at once, whose blocks are in the cache since the warm-up but for the last one, so a round is nearly all decode. Used by
`serving.py`, `tp.py`, `mtp.py` and the nightly play of shapes.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.decode import add_ratio
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.scale import Scale
    from benchmarks.lib.parts import Parts
    from fdasync.stats import SchedulerStats

# decode steps at the head of a round that the steady rate leaves out, at most
_EDGE = 8


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def engine_config(scale: Scale, folder: str, running: int, new_tokens: int, **values: Any) -> EngineConfig:
    """One engine for so many requests at a time; `values`: in place of the fields here."""
    longest = scale.context + new_tokens + 1
    blocks = running * -(-longest // scale.block_tokens)
    fields: dict[str, Any] = {
        "model": folder,
        "runner_config": scale.runner_config(tuple(size for size in scale.sizes if size <= running)),
        "process": "worker",
        "tokenizer": "none",
        "max_context_tokens": longest,
        "block_tokens": scale.block_tokens,
        # those of rounds before may stay in the cache beside
        "num_blocks": min(2 * blocks, blocks + 4000),
        "host_blocks": 0,
        "max_running": running,
        "max_step_tokens": scale.max_step_tokens,
        "max_requests": running,
        "pipeline_depth": 2,
        "seed": 1,
    }
    return EngineConfig(**{**fields, **values})


async def measure(parts: Parts, scale: Scale, folder: str) -> None:
    """Figures of the engine, at all sizes above one."""
    began = time.perf_counter()
    async with Engine(engine_config(scale, folder, scale.sizes[-1], scale.engine_tokens)) as engine:
        parts.report.conditions["engine_start_s"] = round(time.perf_counter() - began, 1)
        for size in scale.sizes[1 if scale.sizes[0] == 1 else 0 :]:
            await _compare(engine, scale, parts, size)
            parts.save()


async def _compare(engine: Engine, scale: Scale, parts: Parts, size: int) -> None:
    prompts, params, report = scale.prompts(size), greedy(scale.engine_tokens), parts.report
    ways = {"replies": True, "none": False}
    for routing in ways.values():  # the first fills the prefix cache
        await one_round(engine, prompts, params, routing=routing, steady=False)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    steady: list[float] = []
    for turn in range(scale.engine_pairs):
        for way in ways if turn % 2 == 0 else reversed(ways):
            wall, rate = await one_round(engine, prompts, params, routing=ways[way], steady=True)
            rates[way].append(size * scale.engine_tokens / wall)
            if way == "replies" and rate:
                steady.append(rate)
    add_ratio(report, f"replies_over_none_{size}", rates["replies"], rates["none"])
    runner = report.figures.get(f"decode_tokens_per_s_{size}_on")
    if steady and runner:
        report.add(f"engine_over_runner_{size}", [rate / runner for rate in steady])


async def one_round(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, *, routing: bool, steady: bool
) -> tuple[float, float]:
    """Seconds until all replies are there, and tokens per second while all decode (0 where that is not known).

    Raises RuntimeError where a reply is not what was asked for.
    """
    watch = asyncio.create_task(_steady(engine, len(prompts), params.max_tokens)) if steady else None
    began = time.perf_counter()
    try:
        results = await asyncio.gather(*[engine.complete(prompt, params, routing=routing) for prompt in prompts])
        wall, rate = time.perf_counter() - began, 0.0
        if watch is not None:
            # it sees the end of the round at its next look, if it saw the beginning
            await asyncio.wait([watch], timeout=0.1)
            rate = watch.result() if watch.done() else 0.0
    finally:
        if watch is not None:
            watch.cancel()
    for prompt, result in zip(prompts, results, strict=True):
        sample: Any = result.samples[0]
        if len(sample.token_ids) != params.max_tokens or (sample.routing is not None) != routing:
            raise RuntimeError(f"a reply of {len(sample.token_ids)} tokens, {sample.finish_reason}")
        if routing and len(sample.routing.array) != len(prompt) + params.max_tokens - 1:
            raise RuntimeError(f"a reply with rows of {len(sample.routing.array)} positions")
    return wall, rate


async def _steady(engine: Engine, size: int, new_tokens: int) -> float:
    """Tokens per second while all decode, but for the first steps."""

    async def until(steps: int, running: int) -> SchedulerStats:
        # polled, and rarely: a tap that is told of every step would be in the figure
        while (now := engine.stats().scheduler).steps < steps or now.running < running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return now

    first = await until(0, size)
    begin = end = await until(first.steps + min(_EDGE, new_tokens // 8), 0)
    began = ended = time.perf_counter()
    while (now := engine.stats().scheduler).running >= size:
        if now.steps > end.steps:
            end, ended = now, time.perf_counter()
        await asyncio.sleep(0.002)
    tokens = (end.steps - begin.steps) * size + accepted_tokens(end) - accepted_tokens(begin)
    return tokens / (ended - began) if tokens else 0.0


def accepted_tokens(stats: SchedulerStats) -> int:
    """Of all drafts so far."""
    return stats.accepted_tokens + stats.own_accepted_tokens
