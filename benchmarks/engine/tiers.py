"""Time to first token of a long prompt whose prefix is recomputed, or comes back from a tier.

A real mixture-of-experts model on the CPU (one torch thread in every arm), in its worker; prompts of 2,000 tokens that
differ in their first token. Five arms, one after the other in every round, so that a slow minute of the machine falls
on all of them:

    recompute  never seen before
    device     sent again at once
    host       sent again when another prompt of the same length has pushed it out of the device
    file       computed by an engine that is closed; this engine reads it from the file store
    hung       never seen before, with a file store whose process is stopped (SIGSTOP) just before the request and
               continued after it; the next round begins when the breaker has closed again

TTFT is the engine's own (`Result.ttft_s`). `aux_bytes_moved_by_swap` sums the runner's counter over all copies.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.lib.report import Report, calibrate_us
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.events.catalog import BreakerChanged, SwapDone
from fdasync.testing.harness.processes import stop_process

if TYPE_CHECKING:
    from fdasync.result import Result

PROMPT_TOKENS = 2000
AIMS = {
    "ttft_host_over_recompute": 0.8,
    "ttft_file_over_recompute": 0.9,
    "ttft_hung_over_recompute": 1.15,
    "aux_bytes_moved_by_swap": 0,
}
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def engine_config(model: Path, **values: Any) -> EngineConfig:
    """One prompt and one block more fit on the device."""
    defaults: dict[str, Any] = {
        "model": str(model),
        "runner_config": {"dtype": "float32", "num_threads": 1},
        "block_tokens": 64,
        "num_blocks": 33,
        "host_blocks": 128,
        "max_context_tokens": 2048,
        "max_step_tokens": 2048,
        "max_running": 4,
        "max_requests": 8,
        "routing": True,
    }
    return EngineConfig(**{**defaults, **values})


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(16, 250) for _ in range(PROMPT_TOKENS)]


async def ask(engine: Engine, number: int) -> Result:
    async with engine.generate(prompt(number), PARAMS) as stream:
        async for _ in stream:
            pass
    return stream.result


def took(result: Result, tier: str) -> float:
    """Seconds to the first token. Raises SystemExit if the prefix did not come from this tier."""
    cached = result.cached
    want = PROMPT_TOKENS // 64 * 64
    # eviction takes leaves first: the first block or two of a prompt may still be on the device
    have = {"recompute": want if not cached.total else 0, "device": cached.device, "host": cached.host + 128,
            "file": cached.store, "hung": want if not cached.total else 0}[tier]  # fmt: skip
    if have < want or (tier == "host" and cached.total < want):
        raise SystemExit(f"the {tier} arm found {cached}: nothing was measured")
    assert result.ttft_s is not None
    return result.ttft_s


class Hung:
    """A file store's engine whose store can be stopped: every call hangs, for real."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pid = engine.store_pid

    async def ask(self, number: int) -> Result:
        async with self._engine.bus.subscribe(BreakerChanged) as changes:
            stop_process(self._pid)
            try:
                result = await ask(self._engine, number)
            finally:
                os.kill(self._pid, signal.SIGCONT)
            await self._closed(changes)
        return result

    async def _closed(self, changes: Any) -> None:
        """Wait until the breaker is closed again, if it opened, and no write is on its way to the store."""
        state = "closed"
        async with asyncio.timeout(60):
            while changes.pending or state != "closed" or self._engine.stats().scheduler.writing:
                if changes.pending or state != "closed":
                    state = (await anext(changes)).state
                else:
                    await asyncio.sleep(0.01)


async def measure(model: Path, folder: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each arm by round, and the aux bytes that copies moved."""
    times: dict[str, list[float]] = {name: [] for name in ("recompute", "device", "host", "file", "hung")}
    stored = {"store": "file", "store_config": {"path": str(folder / "read")}}
    print(f"writing {rounds} prompts to a file store", flush=True)
    async with Engine(engine_config(model, **stored)) as writer:
        for number in range(rounds):
            await ask(writer, 10_000 + number)
    hanging = {"store": "file", "store_config": {"path": str(folder / "hung")}, "store_deadline_s": 1.0,
               "store_retry_s": 0.05}  # fmt: skip
    aux_nbytes = 0
    plain, reader = Engine(engine_config(model)), Engine(engine_config(model, **stored))
    async with plain, reader, Engine(engine_config(model, **hanging)) as broken:
        hung = Hung(broken)
        async with plain.bus.subscribe(SwapDone, limit=1 << 16) as swaps:
            # a first request: the engine learns what prefill costs, and touches its memory
            for engine in (plain, reader, broken):
                await ask(engine, 99_999)
            await ask(plain, 0)
            for number in range(1, rounds + 1):
                times["recompute"].append(took(await ask(plain, number), "recompute"))
                times["device"].append(took(await ask(plain, number), "device"))
                times["host"].append(took(await ask(plain, number - 1), "host"))
                times["file"].append(took(await ask(reader, 10_000 + number - 1), "file"))
                times["hung"].append(took(await hung.ask(number), "hung"))
                print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in times.items()), flush=True)
            while swaps.pending:
                swap = await anext(swaps)
                assert isinstance(swap, SwapDone)
                aux_nbytes += swap.aux_nbytes
            if not swaps.delivered:
                raise SystemExit("no block was swapped: nothing was measured")
    return times, aux_nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="requests of each arm (default 15)")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a random one is made)")
    parser.add_argument("--json", dest="json_path", help="write the figures here")
    options = parser.parse_args()
    from fdasync_transformers import make_random_checkpoint

    report = Report("tiers: TTFT of a 2,000-token prompt")
    report.conditions["calibration_us"] = calibrate_us()
    with tempfile.TemporaryDirectory(prefix="fdasync-tiers-") as name:
        folder = Path(name)
        model = options.model or make_random_checkpoint(folder / "model", "qwen3_moe", size="deep")
        times, aux_nbytes = uvloop.run(measure(model, folder, options.rounds))
    recompute_s = report.add("ttft_recompute_s", times["recompute"])
    if recompute_s < 1.0:
        report.conditions["note"] = "prefill took less than 1 s: ratios say less than they should"
    for tier in ("device", "host", "file", "hung"):
        name = f"ttft_{tier}_over_recompute"
        report.add(name, [value / recompute_s for value in times[tier]], aim=AIMS.get(name))
        report.conditions[f"ttft_{tier}_s"] = round(statistics.median(times[tier]), 4)
    report.add("aux_bytes_moved_by_swap", [aux_nbytes], aim=AIMS["aux_bytes_moved_by_swap"])
    report.finish(options.json_path)
