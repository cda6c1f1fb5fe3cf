"""What a decode step costs the engine process, in CPU microseconds.

The whole engine (bus, scheduler, driver, row copies, output) on a uvloop loop with the synthetic runner in
its free mode: 1,000-token prompts, prefix cache, stop ids and routing on (48 layers, top-8, uint8, real
scatter into the arena). Counted over at least 500 steady steps: all requests decode, none arrives or ends.
The runner runs in process; its own time, measured alone without its scatter, is subtracted, and the scatter
stays in the figure. Page faults of the arena's first touch are paid before the count begins, as in an engine
that has run for a while. Those of the results' own arrays are in the figure of the first run of a process.

    step_us_final_N     N running, results at the end (aims: 200 at 128, 400 at 256)
    step_us_stream_N    N running, each read by a stream (aim: 800 at 128)
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from typing import Any

import uvloop

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.events.catalog import StepDone
from fdasync.request import SamplerSpec
from fdasync.runner.base import RunnerLimits
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig

PROMPT_TOKENS = 1000
WARM_STEPS = 60
BLOCK_TOKENS = 16

AIMS = {"step_us_final_128": 200.0, "step_us_final_256": 400.0, "step_us_stream_128": 800.0}


def runner_config(running: int, new_tokens: int) -> dict[str, Any]:
    blocks = -(-(PROMPT_TOKENS + new_tokens) // BLOCK_TOKENS) + 1
    return {
        "num_moe_layers": 48,
        "top_k": 8,
        "num_experts": 128,
        "vocab_size": 150_000,
        "eos_id": 149_999,
        "max_context_tokens": PROMPT_TOKENS + new_tokens + 1,
        "num_blocks": running * (blocks + 1),
        "block_tokens": BLOCK_TOKENS,
        "free": True,
    }


async def measure(running: int, steps: int, *, streams: bool) -> float:
    """CPU microseconds of this process for a step, the runner's own time not subtracted."""
    new_tokens = steps + 2 * WARM_STEPS + 64
    config = EngineConfig(
        runner="synthetic",
        runner_config=runner_config(running, new_tokens),
        process="inline",
        max_running=running,
        max_step_tokens=8192,
        max_requests=running,
        pipeline_depth=1,
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, stop_token_ids=(149_998, 149_997))
    async with Engine(config) as engine:
        assert engine._runtime._arena is not None
        for rows in engine._runtime._arena.rows.values():
            rows.fill(0)

        async def ask(number: int) -> None:
            # apart by less than a stop id, so that the free mode's tokens never reach one
            prompt = [(number * PROMPT_TOKENS + i) % 140_000 for i in range(PROMPT_TOKENS)]
            if not streams:
                await engine.complete(prompt, params)
                return
            async with engine.generate(prompt, params) as stream:
                async for _delta in stream:
                    pass

        tasks = [asyncio.create_task(ask(number)) for number in range(running)]
        try:
            return await _count(engine, running, steps)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _count(engine: Engine, running: int, steps: int) -> float:
    async with engine.bus.subscribe(StepDone, limit=1 << 20) as done:
        async for event in done:
            assert isinstance(event, StepDone)
            if len(event.tokens) == running:
                first = event.step_id
                break
    stats = engine.stats
    await _reach(engine, first + WARM_STEPS)
    begin_step, begin = stats().scheduler.steps, time.process_time()
    await _reach(engine, begin_step + steps)
    spent, end_step = time.process_time() - begin, stats().scheduler.steps
    if stats().scheduler.running != running:
        raise RuntimeError("requests ended while steps were counted")
    return spent / (end_step - begin_step) * 1e6


async def _reach(engine: Engine, step: int) -> None:
    # polled, and rarely: a tap that gets every step would be in the figure
    while engine.stats().scheduler.steps < step:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def runner_alone(running: int, steps: int) -> float:
    """CPU microseconds per step of the free synthetic runner itself, without arena."""
    config = SyntheticConfig(**runner_config(running, steps + WARM_STEPS))
    limits = RunnerLimits(max_running=running, max_step_tokens=1 << 20, capture=False)
    runner = SyntheticRunner(config, limits)
    capacity = await runner.open()
    await runner.bind(capacity.num_blocks, None)
    spec = SamplerSpec(prompt_len=1)
    per = -(-(steps + WARM_STEPS + 2) // BLOCK_TOKENS)
    starts = tuple(
        SeqStart(key, (key).to_bytes(4, "little"), 0, tuple(range(key * per, (key + 1) * per)), (), (), spec)
        for key in range(running)
    )
    await runner.launch(RunStep(0, starts=starts, chunks=tuple(Chunk(key, 1, True) for key in range(running))))
    for step in range(1, WARM_STEPS):
        await runner.launch(RunStep(step))
    begin = time.process_time()
    for step in range(WARM_STEPS, WARM_STEPS + steps):
        runner.launch(RunStep(step))
        if step % 64 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    spent = time.process_time() - begin
    await runner.aclose()
    return spent / steps * 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=at_least_one, default=500, help="steady steps to count in each run")
    parser.add_argument("--runs", type=at_least_one, default=3, help="runs of each case; medians are reported")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains this")
    args = parser.parse_args()
    cases = {
        f"step_us_{'stream' if streams else 'final'}_{running}": (running, streams)
        for running, streams in itertools.product((32, 128, 256), (False, True))
    }
    chosen = {name: case for name, case in cases.items() if args.only in name}
    if not chosen:
        parser.error(f"--only: {args.only!r} is in no name; there are {', '.join(cases)}")
    report = Report("Engine CPU per decode step, microseconds")
    report.conditions |= {"steps": args.steps, "prompt_tokens": PROMPT_TOKENS, "rows": "48 layers x top-8 uint8"}
    for name, (running, streams) in chosen.items():
        values, own = [], []
        for _ in range(args.runs):
            own.append(uvloop.run(runner_alone(running, args.steps)))
            values.append(uvloop.run(measure(running, args.steps, streams=streams)))
        # the median of several: one noisy measurement of the runner must not end up in the engine's figure
        runner_us = statistics.median(own)
        report.conditions[f"{name}_runner_us"] = round(runner_us, 2)
        report.add(name, [value - runner_us for value in values], aim=AIMS.get(name))
    report.finish(args.json_path)
