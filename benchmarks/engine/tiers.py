"""Time to first token of a long prompt whose prefix is recomputed, or comes back from a tier.

A real mixture-of-experts model on the CPU (one torch thread in every arm), in its worker; prompts of 2,000 tokens that
differ in their first token. Six arms, one after the other in every round, so that a slow minute of the machine falls
on all of them:

    recompute  never seen before
    host       sent again when another prompt of the same length has pushed it out of the device (aim: 0.8)
    file       computed by an engine that is closed; this engine reads it from the file store (aim: 0.9)
    hung       never seen before, with a file store whose process is stopped (SIGSTOP) just before the request and
               continued after it; the next round begins when the breaker has closed again (aim: 1.15)

    scored     never seen before, with the log-probs of all its tokens
    kept       the same request again, over blocks that have their final hidden states (aim: 0.2 of `scored`)

TTFT is the engine's own (`Result.ttft_s`); the figures of `host`, `file` and `hung` are over the median of the first.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.events.catalog import BreakerChanged
from fdasync.testing.harness.processes import stop_process

if TYPE_CHECKING:
    from fdasync.result import Result

PROMPT_TOKENS = 2000
BLOCK_TOKENS = 64
AIMS = {"host": 0.8, "file": 0.9, "hung": 1.15}
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs_start=0)
KEPT_AIM = 0.2


def engine_config(model: Path, aux: tuple[str, ...] = (), **values: Any) -> EngineConfig:
    """One prompt and one block more fit on the device."""
    return EngineConfig(
        model=str(model),
        runner_config={"dtype": "float32", "num_threads": 1, "aux": aux},
        block_tokens=BLOCK_TOKENS,
        num_blocks=33,
        host_blocks=128,
        max_context_tokens=2048,
        max_step_tokens=2048,
        max_running=4,
        max_requests=8,
        routing=True,
        **values,
    )


async def ask(engine: Engine, number: int, params: SamplingParams = PARAMS) -> Result:
    rng = random.Random(number)
    prompt = [rng.randrange(16, 250) for _ in range(PROMPT_TOKENS)]
    async with engine.generate(prompt, params) as stream:
        async for _ in stream:
            pass
    return stream.result


def took(result: Result, tier: str) -> float:
    """Seconds to the first token. Raises SystemExit if the prefix did not come from this tier."""
    cached, want = result.cached, PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    if tier == "host":
        # eviction takes leaves first: the first block or two of a prompt may still be on the device
        came = cached.total >= want and cached.host >= want - 2 * BLOCK_TOKENS
    elif tier == "kept":
        came = cached.device >= want
    else:
        came = cached.store >= want if tier == "file" else not cached.total
    if not came:
        raise SystemExit(f"the {tier} arm found {cached}: nothing was measured")
    assert result.ttft_s is not None
    return result.ttft_s


async def ask_hung(engine: Engine, number: int) -> Result:
    """A request while every call of the store hangs, for real; then the store goes on and is waited for."""
    pid = engine.store_pid
    async with engine.bus.subscribe(BreakerChanged) as changes:
        stop_process(pid)
        try:
            result = await ask(engine, number)
        finally:
            os.kill(pid, signal.SIGCONT)
        # until the breaker is closed again, if it opened, and no write is on its way to the store
        state = "closed"
        async with asyncio.timeout(60):
            while changes.pending or state != "closed" or engine.stats().scheduler.writing:
                if changes.pending or state != "closed":
                    change = await anext(changes)
                    assert isinstance(change, BreakerChanged)
                    state = change.state
                else:
                    await asyncio.sleep(0.01)
    return result


async def measure(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm by round."""
    times: dict[str, list[float]] = {name: [] for name in ("recompute", *AIMS, "scored", "kept")}
    stored = engine_config(model, store="file", store_config={"path": str(folder / "read")})
    print(f"writing {rounds} prompts to a file store", flush=True)
    async with Engine(stored) as writer:
        for number in range(rounds):
            await ask(writer, 10_000 + number)
    hanging = engine_config(
        model, store="file", store_config={"path": str(folder / "hung")}, store_deadline_s=1.0, store_retry_s=0.05
    )
    async with (
        Engine(engine_config(model)) as plain, Engine(stored) as reader, Engine(hanging) as hung,
        Engine(engine_config(model, ("final_hidden",))) as keeping,
    ):  # fmt: skip
        # a first request: the engine learns what prefill costs, and touches its memory
        for engine in (plain, reader, hung, keeping):
            await ask(engine, 99_999)
        await ask(plain, 0)
        for number in range(1, rounds + 1):
            times["recompute"].append(took(await ask(plain, number), "recompute"))
            times["host"].append(took(await ask(plain, number - 1), "host"))
            times["file"].append(took(await ask(reader, 10_000 + number - 1), "file"))
            times["hung"].append(took(await ask_hung(hung, number), "hung"))
            times["scored"].append(took(await ask(keeping, number, SCORED), "scored"))
            times["kept"].append(took(await ask(keeping, number, SCORED), "kept"))
            print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in times.items()), flush=True)
    return times


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=15, help="requests of each arm")
    options = parser.parse_args()
    from fdasync_transformers import make_random_checkpoint

    report = Report("tiers: TTFT of a 2,000-token prompt")
    with tempfile.TemporaryDirectory(prefix="fdasync-tiers-") as name:
        folder = Path(name)
        model = make_random_checkpoint(folder / "model", "qwen3_moe", size="deep")
        times = uvloop.run(measure(model, folder, options.rounds))
    recompute_s = report.add("ttft_recompute_s", times["recompute"])
    if recompute_s < 1.0:
        report.conditions["note"] = "prefill took less than 1 s: ratios say less than they should"
    for tier, aim in AIMS.items():
        report.add(f"ttft_{tier}_over_recompute", [value / recompute_s for value in times[tier]], aim=aim)
        report.conditions[f"ttft_{tier}_s"] = round(statistics.median(times[tier]), 4)
    scored_s = report.add("ttft_scored_s", times["scored"])
    report.add("ttft_kept_over_scored", [value / scored_s for value in times["kept"]], aim=KEPT_AIM)
    report.finish(options.json_path)
