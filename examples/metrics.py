"""Watching an engine: Prometheus metrics on the loopback, JSON lines on stderr.

    python examples/metrics.py            # serves a few requests, prints a scrape, ends
    python examples/metrics.py 9400       # goes on: curl http://127.0.0.1:9400/metrics

The engine runs the synthetic runner, with a host tier and a store in memory, both small, so that every tier is used.
"""

from __future__ import annotations

import asyncio
import sys

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.telemetry.json_log import JsonLogTap
from fdasync.telemetry.prometheus import PrometheusTap

CONFIG = EngineConfig(
    runner="synthetic",
    runner_config={"vocab_size": 100, "block_tokens": 4, "num_blocks": 48, "max_context_tokens": 256, "step_s": 0.05},
    process="inline",
    host_blocks=48,
    store="memory",
    max_running=4,
)
STDERR = 2


async def serve(engine: Engine, number: int) -> None:
    prompt = [number % 7] * 64 + [number]
    async with engine.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0)) as stream:
        async for _ in stream:
            pass


async def main(port: int) -> None:
    async with (
        Engine(CONFIG) as engine,
        PrometheusTap(engine, labels={"engine": "example"}) as metrics,
        JsonLogTap(engine, STDERR, name="example"),
    ):
        bound = await metrics.serve(port)
        print(f"http://127.0.0.1:{bound}/metrics", flush=True)
        number = 0
        while port or number < 20:
            await asyncio.gather(*[serve(engine, number + each) for each in range(4)])
            number += 4
        for line in metrics.exposition().decode().splitlines():
            if "_bucket" not in line and not line.startswith("#"):
                print(line)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
