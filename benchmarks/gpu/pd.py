"""Prefill and decode on GPUs of their own, and the same GPUs as mixed instances, with the same requests.

    python -m benchmarks gpu_pd [--json FILE] [--seconds 60] [--rate 8] [--prompt 2048] [--new 256] [--prefill 1]
                                [--decode 1] [--arms wire,pd,mixed] [--transport device] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16, random weights (each instance draws the same), every instance a `fdasync serve`
on its own GPU, a router in this process. Open loop: requests come at random (Poisson) times from a seed, the same for
every arm, whether or not earlier ones were answered; prompts of half to one and a half times `--prompt` random tokens,
`--new` tokens each, streamed, routing rows of all positions in every reply.

    ttft_p50/p99_ms_ARM    from submitting a request to its first token at the caller
    tpot_p50/p99_ms_ARM    a request's time from first to last token, over its tokens but the first
    stall_p50/p99_ms_ARM   a request's longest wait for its next token
    tokens_per_s_ARM       new tokens of requests that ended, over the time from the first arrival to the last end
    moved_gb_per_s         KV and rows that the decode side copied and checked, over the same time (arm pd)
    tpot_p99_pd_over_mixed, stall_p99_pd_over_mixed, ttft_p50_pd_over_mixed
    wire_whole_ms, wire_batches_ms   216 MB of blocks from one GPU to another, checksums included, with no model: at
                           once, and in the batches of the `device` transport (`wire.py`)

What the first `--warm-up` seconds bring is served and not counted. Needs a GPU for each instance; `--tiny` rehearses on
a CPU, where the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for

from benchmarks.gpu.scale import Scale, tiny, write_folder
from benchmarks.lib.report import Report
from fdasync import EngineConfig, RouterConfig, SamplingParams, connect

if TYPE_CHECKING:
    from fdasync_fleet.cli.local.child import Role
    from fdasync_fleet.router.router import Router

# instances say how they are twice a second
_SETTLE_S = 1.5
_REQUEST_S = 300.0
_HOST_NBYTES = 8 << 30
# blocks of 16 tokens, their bytes; milliseconds
_WIRE, _WIRE_AIM_MS, _WIRE_LIMIT_S = (137, 3 << 19), 5.0, 120.0
# K and V in bfloat16
_KV_NBYTES = 2 * 2


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked, and when: `at` seconds after the start, prompts of so many tokens."""

    at: list[float]
    prompts: list[int]
    new: int
    warm_s: float

    @classmethod
    def make(cls, args: argparse.Namespace) -> Load:
        rng = np.random.default_rng(args.seed)
        gaps = rng.exponential(1 / args.rate, int(args.rate * (args.warm_up + args.seconds) * 2) + 16)
        at = [float(one) for one in np.cumsum(gaps) if one < args.warm_up + args.seconds]
        prompts = rng.integers(args.prompt // 2, args.prompt * 3 // 2 + 1, len(at))
        return cls(at, [int(count) for count in prompts], args.new, args.warm_up)


@dataclasses.dataclass
class Answer:
    """Of one request, in seconds: its first token, its last, its longest wait for one; tokens that came."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    stall: float = 0.0
    tokens: int = 0


def config_of(scale: Scale, folder: str, load: Load, most_running: int) -> EngineConfig:
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
        max_running=most_running,
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
    return sum(one.status.totals.received_nbytes for one in router.stats().instances if one.status is not None)


async def arm(
    name: str, counts: dict[Role, int], scale: Scale, folder: str, load: Load, report: Report, transport: str
) -> None:
    """Start instances, play, and add the figures of this arm."""
    most_running = 256 if scale.device != "cpu" else 8
    config = config_of(scale, folder, load, most_running)
    plans = plans_for(config, counts, transport=transport if "prefill" in counts else "auto")
    began = time.perf_counter()
    fleet = LocalFleet(plans)
    async with fleet, connect(fleet.addresses, RouterConfig(require="all")) as router:
        report.conditions[f"start_s_{name}"] = round(time.perf_counter() - began, 1)
        print(f"[{name}] {len(plans)} instances in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        before = await moved_nbytes(router)
        answers = await fleet.while_alive(play(router, scale, load))
        moved = await moved_nbytes(router) - before
        stats = [(one.name, one.status) for one in router.stats().instances]
        report.conditions[f"totals_{name}"] = {
            who: None if status is None else {"steps": status.totals.steps, "preemptions": status.totals.preemptions}
            for who, status in stats
        }
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
        report.add(f"wire_{name}_ms", times_ms, aim=_WIRE_AIM_MS)


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


async def measure(args: argparse.Namespace, report: Report) -> None:
    scale = tiny() if args.tiny else Scale()
    load = Load.make(args)
    report.conditions |= {
        "requests": len(load.at),
        "prompt_tokens": [min(load.prompts), int(np.mean(load.prompts)), max(load.prompts)],
        "new_tokens": load.new,
        "rate_per_s": args.rate,
        "transport": args.transport,
        "block_tokens": scale.block_tokens,
        "dtype": scale.dtype,
        "instances": {"pd": [args.prefill, args.decode], "mixed": args.prefill + args.decode},
    }
    ways: dict[str, dict[Role, int]] = {
        "pd": {"prefill": args.prefill, "decode": args.decode},
        "mixed": {"mixed": args.prefill + args.decode},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), scale)
        for name in args.arms.split(","):
            if name == "wire":
                await wire(report)
            else:
                await arm(name, ways[name], scale, path, load, report, args.transport)
    found = report.figures
    for figure in ("tpot_p99", "stall_p99", "ttft_p50", "ttft_p99"):
        pd, mixed = found.get(f"{figure}_ms_pd"), found.get(f"{figure}_ms_mixed")
        if pd and mixed:
            report.add(f"{figure}_pd_over_mixed", [pd / mixed])


def gpu() -> dict[str, Any]:
    """What the instances run on."""
    import torch
    import transformers

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": names, "torch": torch.__version__, "transformers": transformers.__version__}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals that are measured (default 60)")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of arrivals before them (default 10)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second (default 8)")
    parser.add_argument("--prompt", type=int, default=2048, help="mean prompt tokens (default 2048)")
    parser.add_argument("--new", type=int, default=256, help="new tokens of each (default 256)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances (default 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode instances (default 1)")
    parser.add_argument("--arms", default="pd,mixed", help="of wire, pd and mixed, in this order (default pd,mixed)")
    parser.add_argument("--transport", default="", help="of blocks (default device, from GPU to GPU; --tiny: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths (default 0)")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    args = parser.parse_args()
    wrong = [name for name in args.arms.split(",") if name not in ("wire", "pd", "mixed")]
    if wrong:
        parser.error(f"--arms: {wrong[0]!r} is none of wire, pd and mixed")
    for name in ("seconds", "rate", "prompt", "new", "prefill", "decode"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0")
    args.transport = args.transport or ("auto" if args.tiny else "device")
    if args.tiny:
        args.prompt, args.new = min(args.prompt, 40), min(args.new, 12)
    return args


def main() -> None:
    args = parse()
    report = Report("Prefill and decode on GPUs of their own")
    report.conditions |= gpu()
    if not args.tiny and len(report.conditions["gpus"]) < args.prefill + args.decode:
        sys.exit(
            f"{args.prefill + args.decode} GPUs are needed, one for each instance;"
            f" {len(report.conditions['gpus'])} are here (--tiny rehearses on a CPU)"
        )
    try:
        uvloop.run(measure(args, report))
    finally:
        # what one arm found is not lost with the other
        report.finish(args.json)
