"""Prefill and decode on GPUs of their own, and the same GPUs as mixed instances, with the same requests.

    python -m benchmarks gpu_pd [--json FILE] [--seconds 60] [--rate 8] [--arms wire,pd,mixed] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16, random weights (each instance draws the same), every instance a `fdasync serve`
on its own GPU, a router in this process: one prefill and one decode instance, or two mixed ones. Open loop: requests
come at random (Poisson) times from a seed, the same for every arm, whether or not earlier ones were answered; prompts
of 1,024 to 3,072 random tokens, 256 new tokens each, streamed, routing rows of all positions in every reply.

    ttft_p50/p99_ms_ARM    from submitting a request to its first token at the caller
    tpot_p50/p99_ms_ARM    a request's time from first to last token, over its tokens but the first
    stall_p50/p99_ms_ARM   a request's longest wait for its next token
    tokens_per_s_ARM       new tokens of requests that ended, over the time from the first arrival to the last end
    moved_gb_per_s         KV and rows that the decode side copied and checked, over the same time (arm pd)
    ttft_p50_pd_over_mixed, ttft_p99_pd_over_mixed, tpot_p99_pd_over_mixed, stall_p99_pd_over_mixed
    wire_whole_ms, wire_batches_ms   216 MB of blocks from one GPU to another, checksums included, with no model: at
                           once, and in the batches of the `device` transport (`wire.py`)

What 10 seconds before `--seconds` bring is served and not counted. Needs two GPUs; `--tiny` rehearses pd and mixed on
a CPU, where the figures mean nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.cli.local.options import LinkOptions

from benchmarks.gpu.models import DEFAULT_MODEL
from benchmarks.gpu.options import begin, parser_of
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from benchmarks.lib.arguments import above_zero, names_of
from fdasync import EngineConfig, RouterConfig, SamplingParams, connect

if TYPE_CHECKING:
    import argparse

    from fdasync_fleet.cli.local.child import Role
    from fdasync_fleet.router.router import Router

    from benchmarks.lib.parts import Parts
    from benchmarks.lib.report import Report

_ARMS: dict[str, dict[Role, int]] = {"pd": {"prefill": 1, "decode": 1}, "mixed": {"mixed": 2}}
_AIMS = {
    "ttft_p50_pd_over_mixed": 1.02,
    "ttft_p99_pd_over_mixed": 1.15,
    "wire_whole_ms": 5.0,
    "wire_batches_ms": 5.0,
}
# instances say how they are twice a second
_SETTLE_S = 1.5
_REQUEST_S = 300.0
_HOST_NBYTES = 8 << 30
# blocks of 16 tokens, their bytes
_WIRE, _WIRE_LIMIT_S = (137, 3 << 19), 120.0
# K and V in bfloat16
_KV_NBYTES = 2 * 2


@dataclass(frozen=True)
class Load:
    """What is asked, and when: `at` seconds after the start, prompts of so many tokens. Those before `warm_s` do not
    count."""

    at: list[float]
    prompts: list[int]
    new: int
    warm_s: float

    @classmethod
    def make(cls, rate: float, seconds: float, *, tiny: bool = False, seed: int = 0) -> Load:
        """Requests at so many a second, and for how long they count."""
        prompt, new, warm_s = (40, 12, 1.0) if tiny else (2048, 256, 10.0)
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1 / rate, int(rate * (warm_s + seconds) * 2) + 16)
        at = [float(one) for one in np.cumsum(gaps) if one < warm_s + seconds]
        prompts = rng.integers(prompt // 2, prompt * 3 // 2 + 1, len(at))
        return cls(at, [int(count) for count in prompts], new, warm_s)


@dataclass
class Answer:
    """Of one request, in seconds: its first token, its last, its longest wait for one; tokens that came."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    stall: float = 0.0
    tokens: int = 0


def config_of(scale: Scale, folder: str, load: Load) -> EngineConfig:
    model = scale.config
    block_nbytes = (
        scale.block_tokens * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * _KV_NBYTES
    )
    on_gpu = scale.device != "cpu"
    return EngineConfig(
        model=folder,
        runner_config={
            "dtype": scale.dtype,
            "weights": "random",
            "device": "auto" if on_gpu else "cpu",
            "self_check": False,
            "kernels": "triton" if on_gpu else "torch",
        },
        tokenizer="none",
        max_context_tokens=max(load.prompts) + load.new + 1,
        block_tokens=scale.block_tokens,
        host_blocks=max(min(_HOST_NBYTES // block_nbytes, 8192), 64),
        max_running=256 if on_gpu else 8,
        max_step_tokens=2048 if on_gpu else 64,
        pipeline_depth=2,
        start_deadline_s=600.0,
        seed=1,
    )


async def one(router: Router, prompt: list[int], params: SamplingParams) -> Answer:
    """Raises RuntimeError where an answer is not what was asked for."""
    answer = Answer(time.perf_counter())
    async with router.generate(prompt, params, deadline_s=_REQUEST_S) as stream:
        async for delta in stream:
            now = time.perf_counter()
            if not answer.tokens:
                answer.first = now
            elif delta.token_ids:
                answer.stall = max(answer.stall, now - answer.last)
            answer.tokens += len(delta.token_ids)
            answer.last = now
        sample = stream.result.samples[0]
    if answer.tokens != params.max_tokens or sample.routing is None:
        raise RuntimeError(f"a reply of {answer.tokens} tokens, {sample.finish_reason}")
    if len(sample.routing.array) != len(prompt) + params.max_tokens - 1:
        raise RuntimeError(f"a reply with rows of {len(sample.routing.array)} positions")
    return answer


async def play(router: Router, scale: Scale, load: Load) -> list[Answer]:
    """Ask at the times that the load names; answers of those behind the warm-up."""
    rng = np.random.default_rng(7)
    vocab = min(int(scale.config["vocab_size"]), 150_000)
    prompts = [rng.integers(10, vocab, count).tolist() for count in load.prompts]
    params = SamplingParams(max_tokens=load.new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        asked = []
        for at, prompt in zip(load.at, prompts, strict=True):
            await asyncio.sleep(max(began + at - time.perf_counter(), 0.0))
            asked.append((at, tasks.create_task(one(router, prompt, params))))
    return [task.result() for at, task in asked if at >= load.warm_s]  # of tasks that are done


async def moved_nbytes(router: Router) -> int:
    """Of blocks that went from one instance to another, by what the instances say of themselves."""
    await asyncio.sleep(_SETTLE_S)
    return sum(one.status.received_nbytes for one in router.stats().instances if one.status is not None)


async def arm(name: str, parts: Parts, scale: Scale, folder: str, load: Load) -> None:
    """Start instances, play, and add the figures of this arm."""
    report, counts = parts.report, _ARMS[name]
    links = LinkOptions(transport="device" if scale.device != "cpu" and name == "pd" else "auto")
    fleet = LocalFleet(plans_for(config_of(scale, folder, load), counts, links))
    async with fleet, connect(fleet.addresses, RouterConfig(require="all")) as router:
        parts.say(f"{name}: the instances are there")
        before = await moved_nbytes(router)
        answers = await fleet.while_alive(play(router, scale, load))
        moved = await moved_nbytes(router) - before
    tell(name, answers, moved, load, report)


async def wire(report: Report) -> None:
    """Raises RuntimeError where the blocks do not come, or not as they were."""
    command = ["-m", "benchmarks.gpu.wire", *map(str, _WIRE)]
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_WIRE_LIMIT_S):
            said, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"the copies of blocks ended with {child.returncode}")
    for name, times_ms in json.loads(said).items():
        report.add(f"wire_{name}_ms", times_ms)


def tell(name: str, answers: list[Answer], moved: int, load: Load, report: Report) -> None:
    """Figures of one arm's answers."""
    figures = {
        "ttft": [answer.first - answer.asked for answer in answers],
        "tpot": [(answer.last - answer.first) / max(answer.tokens - 1, 1) for answer in answers],
        "stall": [answer.stall for answer in answers],
    }
    for figure, values in figures.items():
        for percent in (50, 99):
            report.add(f"{figure}_p{percent}_ms_{name}", [float(np.percentile(values, percent)) * 1e3])
    took = max(answer.last for answer in answers) - min(answer.asked for answer in answers)
    report.add(f"tokens_per_s_{name}", [sum(answer.tokens for answer in answers) / took])
    report.conditions[f"answers_{name}"] = len(answers)
    if moved:
        report.add("moved_gb_per_s", [moved / (took + load.warm_s) / 1e9])


async def measure(parts: Parts, scale: Scale, load: Load, arms: set[str]) -> None:
    report = parts.report
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), scale)
        if "wire" in arms:
            await parts.run("wire", wire, report)
        for name in _ARMS:
            if name in arms:
                await parts.run(name, arm, name, parts, scale, path, load)
    for figure in ("tpot_p99", "stall_p99", "ttft_p50", "ttft_p99"):
        pd, mixed = (report.figures.get(f"{figure}_ms_{name}") for name in _ARMS)
        if pd and mixed:
            report.add(f"{figure}_pd_over_mixed", [pd / mixed])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="of arrivals that are measured")
    parser.add_argument("--rate", type=above_zero, default=8.0, help="requests a second")
    parser.add_argument("--arms", type=names_of(("wire", *_ARMS)), default="pd,mixed", help="what is measured")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    scale = tiny() if args.tiny else large(DEFAULT_MODEL)
    load = Load.make(args.rate, args.seconds, tiny=args.tiny)
    parts = begin(
        "Prefill and decode on GPUs of their own", args, _AIMS, gpus=2, requests=len(load.at), rate_per_s=args.rate,
        prompt_tokens=[min(load.prompts), int(np.mean(load.prompts)), max(load.prompts)], new_tokens=load.new,
        **scale.facts,
    )  # fmt: skip
    uvloop.run(measure(parts, scale, load, args.arms))
    return parts.finish()
