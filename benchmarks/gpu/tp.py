"""One model over several GPUs: tokens a second of a group of ranks against one process of the same commit.

    python -m benchmarks gpu_tp [--tp 2] [--json FILE] [--model NAME] [--only x,s,d,w] [--sizes 1,64,256,512]
                                [--rounds 3] [--collectives auto] [--sum-slices N] [--no-base | --base FILE] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the devices, each rank's as slices of one seed; `--model
glm-4.5-air` takes all 46 layers, which no single GPU holds (`--no-base` is then implied). Whole engines with workers,
two steps in flight, routing in every reply, greedy, prompts of 1,024. Parts, each in engines of its own:

x   `exact_tokens`, `exact_rows`: shares of equal tokens and of equal rows (sets of experts) of the group against one
    process, of a small model in float32; both are to be 1. Raises nothing: the figures tell.
s   `sum_us_N`: one all-reduce of N tokens' hidden states, from graphs of 40 of them, on otherwise idle devices;
    `sum_message_us`: the exchange at the end of a step.
d   `decode_tokens_per_s_N_tpK`: while all N decode, as `gpu_serving` has it for whole engines.
    `prefill_tokens_per_s_tpK`: 64 new prompts, one token each. `tpK_over_tp1_N`, `prefill_tpK_over_tp1`. `sum_share_N`:
    two sums a layer, as long as part s found them, over the step. `memory_gb_tpK`: the most that one GPU has in use,
    by nvidia-smi.
w   `workload_s`, `workload_decode_tokens_per_s`: 64 requests of 1,024 in and 512 out at once with routing, at K ranks,
    as SGLang published for four H200 (4.34 s; 8,609 tokens/s).

`--collectives nccl` lets the ranks of d and w sum by NCCL, as GPUs without access to each other's memory do.
`--sum-slices 4` gives d and w fixed numerics, whose sums are made of four parts at any width (1: whole sums, for one
rank). `--tp 1` measures one process alone; `--base FILE` takes its figures from that run, which is to be of the same
commit and machine, so that several widths are compared with one run of it.

Figures are written to the JSON after every part; an error in one part is reported there (`errors`) and makes the exit
status 1. Needs as many CUDA GPUs as ranks; `--tiny` rehearses all but s in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.children import child
from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.gpu.scale import Scale, tiny, write_folder
from benchmarks.gpu.serving import Run
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PARTS = "xsdw"
_SIZES = (1, 64, 256, 512)
# requests and new tokens of the published run, and requests of a prefill
_WORKLOAD, _PREFILLS = (64, 512), 64
_SUMS_LIMIT_S = 120.0

#: of the default model: figures that are to be at least so large, by ranks
LEAST = {
    2: {"tp2_over_tp1_64": 1.6, "tp2_over_tp1_256": 1.6, "prefill_tp2_over_tp1": 1.5},
    4: {"tp4_over_tp1_64": 2.6, "tp4_over_tp1_256": 2.6, "workload_decode_tokens_per_s": 8609.0},
}
#: and those that are to be at most so large
MOST = {4: {"workload_s": 4.34}}


def scale_of(args: argparse.Namespace) -> Scale:
    """The model whole; weights on the GPUs that the engine gives to its ranks."""
    if args.tiny:
        return dataclasses.replace(tiny(args.model), sizes=(1, 2))
    shape = MODELS[args.model].shape
    sizes = tuple(sorted({int(size) for size in args.sizes.split(",")}))
    return Scale(
        collectives=args.collectives,
        model=args.model,
        config=shape.cut(shape.config["num_hidden_layers"]),
        device="auto",
        sizes=sizes,
    )


def aims_of(scale: Scale, ranks: int, aims: Mapping[int, dict[str, float]]) -> dict[str, float]:
    """By figure; none for other models, or on a CPU."""
    return aims.get(ranks, {}) if scale.model == DEFAULT_MODEL and scale.device != "cpu" else {}


def engine_config(scale: Scale, folder: str, ranks: int, running: int, longest: int, **values: Any) -> EngineConfig:
    """One engine over so many ranks; KV takes the memory that is left, or a rehearsal's few blocks."""
    small = scale.device == "cpu"
    runner = values.pop("runner_config", None)
    if runner is None:
        runner = scale.runner_config(tuple(size for size in scale.sizes if size <= running))
    if values.get("numerics") == "fixed":
        # which proves them
        runner["self_check"] = True
    return EngineConfig(
        model=folder,
        runner_config=runner,
        process="worker",
        tensor_parallel=ranks,
        tokenizer="none",
        max_context_tokens=longest,
        block_tokens=scale.block_tokens,
        num_blocks=4 * running * -(-longest // scale.block_tokens) if small else "auto",
        host_blocks=0,
        max_running=running,
        max_step_tokens=scale.max_step_tokens if small else 8192,
        max_requests=max(running, _PREFILLS),
        pipeline_depth=2,
        seed=1,
        **values,
    )


async def exact(run: Run, ranks: int) -> None:
    """Part x."""
    scale = tiny()
    scale = dataclasses.replace(
        scale,
        config={**scale.config, "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 64},
        device=run.scale.device,
    )
    params = SamplingParams(max_tokens=4 if scale.device == "cpu" else 32, temperature=0.0, ignore_eos=True)
    prompts = scale.prompts(2 if scale.device == "cpu" else 16)
    runner = {**scale.runner_config(()), "graph_sizes": None, "num_threads": 1}
    found: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), scale)
        for width in (1, ranks):
            config = engine_config(scale, folder, width, len(prompts), 64, runner_config=runner)
            async with Engine(config) as engine:
                results = await asyncio.gather(*[engine.complete(each, params, routing=True) for each in prompts])
                found.append([result.samples[0] for result in results])
    pairs = list(zip(*found, strict=True))
    tokens = [a == b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True)]
    rows = [
        sorted(a) == sorted(b)
        for one, other in pairs
        for mine, theirs in zip(one.routing.array.tolist(), other.routing.array.tolist(), strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    run.report.add("exact_tokens", [sum(tokens) / len(tokens)], aim=1.0)
    run.report.add("exact_rows", [sum(rows) / len(rows)], aim=1.0)


def sums(run: Run, ranks: int, folder: str) -> None:
    """Part s. Raises RuntimeError where the ranks fail."""
    out = Path(folder) / "sums.json"
    sizes = ",".join(map(str, (*run.scale.sizes, 2048, 8192)))
    problem = child(
        ["benchmarks.gpu.sums", "all", str(ranks), str(run.scale.config["hidden_size"]), sizes, str(out)],
        _SUMS_LIMIT_S,
    )
    if problem:
        raise RuntimeError(problem)
    for name, us in json.loads(out.read_text()).items():
        run.report.add(name, [us])


async def decode(run: Run, ranks: int, folder: str, rounds: int, numerics: Mapping[str, Any]) -> None:
    """Part d, of one width. `numerics`: of the engine's config."""
    from benchmarks.gpu.engine import one_round

    scale, report = run.scale, run.report
    params = SamplingParams(max_tokens=scale.engine_tokens, temperature=0.0, ignore_eos=True)
    longest = scale.context + scale.engine_tokens + 1
    began = time.perf_counter()
    async with Engine(engine_config(scale, folder, ranks, scale.sizes[-1], longest, **numerics)) as engine:
        report.add(f"start_s_tp{ranks}", [time.perf_counter() - began])
        report.conditions[f"num_blocks_tp{ranks}"] = engine.capacity.num_blocks
        report.conditions[f"notes_tp{ranks}"] = [*engine.capacity.notes]
        for size in scale.sizes:
            prompts = scale.prompts(size)
            # the first round fills the prefix cache
            await one_round(engine, prompts, params, routing=True, steady=False)
            rates = [(await one_round(engine, prompts, params, routing=True, steady=True))[1] for _ in range(rounds)]
            rates = [rate for rate in rates if rate]
            if rates:
                report.add(f"decode_tokens_per_s_{size}_tp{ranks}", rates)
            run.save()
        count = 2 if scale.device == "cpu" else _PREFILLS
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        walls = []
        for seed in range(rounds + 1):
            wall, _ = await one_round(engine, scale.prompts(count, 1000 + seed), one, routing=True, steady=False)
            walls.append(count * scale.context / wall)
        report.add(f"prefill_tokens_per_s_tp{ranks}", walls[1:])
        if used := memory_gb():
            report.add(f"memory_gb_tp{ranks}", [max(used)])
            report.conditions[f"memory_gb_by_gpu_tp{ranks}"] = used
    run.save()


def read_base(run: Run, file: str) -> None:
    """Add the figures of one process from the report of another run. Raises SystemExit where they are of something
    else."""
    base = json.loads(Path(file).read_text())
    if base["conditions"].get("tensor_parallel") != 1:
        raise SystemExit(f"--base {file}: it is of {base['conditions'].get('tensor_parallel')} ranks, not of one")
    for key in ("gpu", "torch", "model", "layers", "dtype", "sum_slices"):
        if base["conditions"].get(key) != run.report.conditions.get(key):
            raise SystemExit(f"--base {file}: {key} is {base['conditions'].get(key)!r} there")
    for name, value in base["figures"].items():
        if name.endswith("_tp1") and "_over_" not in name:
            run.report.add(name, [value])


def compare(run: Run, ranks: int) -> None:
    """The figures that follow from others."""
    figures, aims = run.report.figures, aims_of(run.scale, ranks, LEAST)
    names = [(f"tp{ranks}_over_tp1_{size}", f"decode_tokens_per_s_{size}") for size in run.scale.sizes]
    for name, of in [*names, (f"prefill_tp{ranks}_over_tp1", "prefill_tokens_per_s")]:
        many, one = figures.get(f"{of}_tp{ranks}"), figures.get(f"{of}_tp1")
        if many and one:
            run.report.add(name, [many / one], aim=aims.get(name))
    for size in run.scale.sizes:
        rate, us = figures.get(f"decode_tokens_per_s_{size}_tp{ranks}"), figures.get(f"sum_us_{size}")
        if rate and us:
            each = 2 * int(run.scale.config["num_hidden_layers"])
            run.report.add(f"sum_share_{size}", [each * us * rate / size / 1e6])


async def workload(run: Run, ranks: int, folder: str, rounds: int, numerics: Mapping[str, Any]) -> None:
    """Part w."""
    from benchmarks.gpu.engine import one_round

    scale = run.scale
    requests, new = (2, 8) if scale.device == "cpu" else _WORKLOAD
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    walls, rates = [], []
    own = dataclasses.replace(scale, sizes=(requests,))
    longest = scale.context + new + 1
    async with Engine(engine_config(own, folder, ranks, requests, longest, **numerics)) as engine:
        for seed in range(rounds + 1):
            # new prompts in each round: prefill is a part of the run
            wall, rate = await one_round(engine, scale.prompts(requests, 500 + seed), params, routing=True, steady=True)
            walls.append(wall)
            rates.append(rate)
    found = [rate for rate in rates[1:] if rate]
    run.report.add("workload_s", walls[1:], aim=aims_of(scale, ranks, MOST).get("workload_s"))
    if found:
        run.report.add(
            "workload_decode_tokens_per_s", found, aim=aims_of(scale, ranks, LEAST).get("workload_decode_tokens_per_s")
        )


def memory_gb() -> list[float]:
    """In use on each GPU, of all processes; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [round(int(line) * (1 << 20) / 1e9, 2) for line in said.split()]


def measure(run: Run, args: argparse.Namespace, folder: str) -> None:
    """All parts that were asked for, one after the other."""
    ranks, rounds = args.tp, args.rounds
    numerics = {"numerics": "fixed", "sum_slices": args.sum_slices} if args.sum_slices else {}
    stages: list[tuple[str, str, Callable[[], None]]] = [
        ("exactness", "x", lambda: uvloop.run(exact(run, ranks))),
        ("sums", "s", lambda: sums(run, ranks, folder)),
        (f"{ranks} ranks", "d", lambda: uvloop.run(decode(run, ranks, folder, rounds, numerics))),
        ("the published workload", "w", lambda: uvloop.run(workload(run, ranks, folder, rounds, numerics))),
        ("one process", "d", lambda: uvloop.run(decode(run, 1, folder, rounds, numerics))),
        ("ratios", "d", lambda: compare(run, ranks)),
    ]
    if args.base:
        read_base(run, args.base)
    for name, part, stage in stages:
        if part not in run.parts or (name == "one process" and (args.no_base or args.base or ranks == 1)):
            continue
        if name == "ratios" and ranks == 1:
            continue
        run.say(f"stage: {name}")
        try:
            stage()
        except Exception as error:  # whatever it is, the figures of the others count
            run.failed(name, error)
        run.save()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, choices=(1, 2, 4, 8), default=2, help="ranks of the group (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every part")
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL, help=f"(default {DEFAULT_MODEL})")
    parser.add_argument("--only", metavar="PARTS", default="x,s,d,w", help="of x, s, d and w (default: all)")
    parser.add_argument("--sizes", metavar="N,N", default=",".join(map(str, _SIZES)), help="(default 1,64,256,512)")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure (default 3)")
    parser.add_argument("--collectives", choices=("auto", "peers", "nccl"), default="auto", help="how ranks sum")
    parser.add_argument("--sum-slices", type=int, choices=(1, 2, 4), help="fixed numerics in d and w, with such sums")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--no-base", action="store_true", help="no engine of one process")
    base.add_argument("--base", metavar="FILE", help="the report of a run with --tp 1: its figures of one process")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    args.parts = {part.strip() for part in args.only.split(",") if part.strip()}
    if not args.parts or args.parts - set(_PARTS):
        parser.error(f"--only names {args.only!r}, parts are x, s, d and w")
    if args.tp == 1:
        # one process against itself, and sums of nothing
        args.parts -= {"x", "s"}
    # 212 GB of weights
    args.no_base = args.no_base or (args.model == "glm-4.5-air" and not args.tiny)
    return args


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        args.parts -= {"s"}
        args.rounds = 1
    import torch

    if not args.tiny and torch.cuda.device_count() < args.tp:
        raise SystemExit(f"{args.tp} ranks need as many CUDA GPUs; --tiny rehearses them on a CPU")
    scale = scale_of(args)
    run = Run(scale, args.parts, args.json)
    run.report.title = f"{args.tp} ranks"
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": scale.model,
        "layers": scale.config["num_hidden_layers"],
        "tensor_parallel": args.tp,
        "collectives": args.collectives,
        "sum_slices": args.sum_slices,
        "parts": sorted(args.parts),
        "sizes": scale.sizes,
        "dtype": scale.dtype,
        "rounds": args.rounds,
    }
    if args.tiny:
        run.report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        measure(run, args, write_folder(Path(name), scale))
    run.save()
    run.report.finish(args.json)
    if run.errors:
        for part, error in run.errors.items():
            print(f"error in {part}: {error}", file=sys.stderr)
        raise SystemExit(1)
