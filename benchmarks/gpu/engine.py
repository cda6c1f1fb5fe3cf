"""The whole engine of `gpu_serving`: replies with and without routing, and what the engine costs beside the runner.

The model in a worker process, two steps in flight, prefix cache on, no host tier. Every round sends the same prompts
at once, whose blocks are in the cache since the warm-up but for the last one, so a round is nearly all decode.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.decode import add_ratio
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.scale import Scale
    from benchmarks.lib.report import Report

# decode steps at both ends of a round that the steady rate leaves out, at most
_EDGE = 8


async def measure(
    scale: Scale, folder: str, report: Report, *, replies: bool, library: bool, save: Callable[[], None]
) -> float | None:
    """Figures of the engine; new tokens per second of the library's requests where they are wanted, else None."""
    sizes = tuple(size for size in scale.sizes if size > 1) if replies else ()
    requests, new = scale.library
    if not sizes and not library:
        return None
    running = max([*sizes, requests if library else 1])
    longest = scale.context + max(scale.engine_tokens, new) + 1
    # rounds of other prompts may stay in the cache beside these
    blocks = (2 * running + (2 * requests if library else 0)) * -(-longest // scale.block_tokens)
    config = EngineConfig(
        model=folder,
        runner_config=scale.runner_config(tuple(sorted({*sizes, *((requests,) if library else ())}))),
        process="worker",
        tokenizer="none",
        max_context_tokens=longest,
        block_tokens=scale.block_tokens,
        num_blocks=min(blocks, 24_000),
        host_blocks=0,
        max_running=running,
        max_step_tokens=scale.max_step_tokens,
        max_requests=running,
        pipeline_depth=2,
        seed=1,
    )
    began = time.perf_counter()
    async with Engine(config) as engine:
        report.conditions["engine_start_s"] = round(time.perf_counter() - began, 1)
        for size in sizes:
            await _compare(engine, scale, report, size)
            save()
        if not library:
            return None
        rates = []
        for seed in (101, 102):
            params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            wall, _ = await one_round(engine, scale.prompts(requests, seed), params, routing=True, steady=False)
            rates.append(requests * new / wall)
        return report.add("ours_new_tokens_per_s", rates)


async def _compare(engine: Engine, scale: Scale, report: Report, size: int) -> None:
    prompts = scale.prompts(size)
    params = SamplingParams(max_tokens=scale.engine_tokens, temperature=0.0, ignore_eos=True)
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
    for way, values in rates.items():
        report.add(f"engine_tokens_per_s_{size}_{way}", values)
    add_ratio(report, f"replies_over_none_{size}", rates["replies"], rates["none"])
    if not steady:
        return
    rate = report.add(f"engine_steady_tokens_per_s_{size}", steady)
    runner = report.figures.get(f"decode_tokens_per_s_{size}_on")
    if runner:
        name = f"engine_over_runner_{size}"
        report.add(name, [rate / runner], aim=scale.aim(name))


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
        wall = time.perf_counter() - began
        rate = watch.result() if watch is not None and watch.done() else 0.0
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
    """Tokens per second between the first steps of a round and its last; 0 where that was not seen."""

    async def reach(step: int, running: int) -> tuple[int, float]:
        # polled, and rarely: a tap that is told of every step would be in the figure
        while (now := engine.stats().scheduler).steps < step or now.running < running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return now.steps, time.perf_counter()

    edge = min(_EDGE, new_tokens // 8)
    first, _ = await reach(0, size)
    begin_step, began = await reach(first + edge, 0)
    end_step, ended = await reach(begin_step + max(1, new_tokens - 4 * edge - 2), 0)
    if engine.stats().scheduler.running < size:
        return 0.0
    return (end_step - begin_step) * size / (ended - began)
