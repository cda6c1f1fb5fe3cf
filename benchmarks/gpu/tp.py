"""One model over several GPUs: tokens a second of a group of ranks against one process of the same commit.

    python -m benchmarks gpu_tp [--tp 2] [--json FILE] [--model NAME] [--only x,s,d,w] [--sizes 1,64,256,512]
                                [--rounds 3] [--collectives auto] [--sum-slices N] [--no-base | --base FILE] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the devices, each rank's as slices of one seed; `--model
glm-4.5-air` takes all 46 layers, which no single GPU holds (give `--no-base` too). Whole engines with workers, two
steps in flight, routing in every reply, greedy, prompts of 1,024. Parts, each in engines of its own:

x   `exact_tokens`, `exact_rows`: shares of equal tokens and of equal rows (sets of experts) of the group against one
    process, of a small model in float32; both are to be 1. Raises nothing: the figures tell.
s   `sum_us_N`: one all-reduce of N tokens' hidden states, from graphs of 40 of them, on otherwise idle devices.
d   `decode_tokens_per_s_N_tpK`: while all N decode, as `gpu_serving` has it for whole engines.
    `prefill_tokens_per_s_tpK`: 64 new prompts, one token each. `tpK_over_tp1_N`, `prefill_tpK_over_tp1`. `sum_share_N`:
    two sums a layer, as long as part s found them, over the step.
w   `workload_s`, `workload_decode_tokens_per_s`: 64 requests of 1,024 in and 512 out at once with routing, at K ranks,
    as SGLang published for four H200 (4.34 s; 8,609 tokens/s).

`--collectives nccl` lets the ranks of d and w sum by NCCL, as GPUs without access to each other's memory do.
`--sum-slices 4` gives d and w fixed numerics, whose sums are made of four parts at any width (1: whole sums, for one
rank). `--tp 1` measures one process alone; `--base FILE` takes its figures from that run, which is to be of the same
commit and machine, so that several widths are compared with one run of it.

Figures are written to the JSON after every part; an error in one part is reported there (`failed`) and makes the exit
status 1. Needs as many CUDA GPUs as ranks; `--tiny` rehearses all but s in Triton's interpreter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.gpu.options import begin, parser_of, sizes_of
from benchmarks.gpu.scale import Scale, tiny, write_folder
from benchmarks.lib.arguments import at_least_one, kept, names_of, refuse
from fdasync import Engine

if TYPE_CHECKING:
    import argparse

    from benchmarks.lib.parts import Parts
    from benchmarks.lib.report import Report

# requests and new tokens of the published run, and requests of a prefill
_WORKLOAD, _PREFILLS = (64, 512), 64
#: of the default model, by ranks; seconds are to be at most so many, all others at least
AIMS = {
    2: {"tp2_over_tp1_64": 1.6, "tp2_over_tp1_256": 1.6, "prefill_tp2_over_tp1": 1.5},
    4: {
        "tp4_over_tp1_64": 2.6,
        "tp4_over_tp1_256": 2.6,
        "workload_s": 4.34,
        "workload_decode_tokens_per_s": 8609.0,
    },
}


def scale_of(args: argparse.Namespace) -> Scale:
    """The model whole; weights on the GPUs that the engine gives to its ranks."""
    if args.tiny:
        return tiny(args.model)
    shape = MODELS[args.model].shape
    config = shape.cut(shape.config["num_hidden_layers"])
    runner = {"collectives": args.collectives}
    return Scale(model=args.model, config=config, device="auto", sizes=args.sizes, runner=runner)


async def exact(report: Report, like: Scale, ranks: int) -> None:
    """Part x, on the device of this scale."""
    from benchmarks.gpu.engine import engine_config, greedy

    count, new_tokens = (2, 4) if like.device == "cpu" else (16, 32)
    small = tiny()
    wide = {**small.config, "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 64}
    scale = dataclasses.replace(small, config=wide, device=like.device, sizes=(count,))
    prompts = scale.prompts(count)
    found: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), scale)
        runner = {**scale.runner_config(None), "num_threads": 1}
        for width in (1, ranks):
            config = engine_config(scale, folder, count, new_tokens, tensor_parallel=width, runner_config=runner)
            async with Engine(config) as engine:
                asked = [engine.complete(each, greedy(new_tokens), routing=True) for each in prompts]
                found.append([result.samples[0] for result in await asyncio.gather(*asked)])
    pairs = list(zip(*found, strict=True))
    tokens = [a == b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True)]
    rows = [
        sorted(a) == sorted(b)
        for one, other in pairs
        for mine, theirs in zip(one.routing.array.tolist(), other.routing.array.tolist(), strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    report.add("exact_tokens", [sum(tokens) / len(tokens)], aim=1.0)
    report.add("exact_rows", [sum(rows) / len(rows)], aim=1.0)


async def sums(report: Report, scale: Scale, ranks: int) -> None:
    """Part s."""
    from benchmarks.gpu.sums import measure

    for name, us in measure(ranks, scale.config["hidden_size"], scale.sizes).items():
        report.add(name, [us])


async def decode(parts: Parts, scale: Scale, folder: str, rounds: int, values: dict[str, Any]) -> None:
    """Part d, of one width. `values`: of the engine's config."""
    from benchmarks.gpu.engine import engine_config, greedy, one_round

    report, ranks = parts.report, values["tensor_parallel"]
    params = greedy(scale.engine_tokens)
    began = time.perf_counter()
    async with Engine(engine_config(scale, folder, scale.sizes[-1], scale.engine_tokens, **values)) as engine:
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
            parts.save()
        count = 2 if scale.device == "cpu" else _PREFILLS
        walls = []
        for seed in range(rounds + 1):
            prompts = scale.prompts(count, 1000 + seed)
            wall, _ = await one_round(engine, prompts, greedy(1), routing=True, steady=False)
            walls.append(count * scale.context / wall)
        report.add(f"prefill_tokens_per_s_tp{ranks}", walls[1:])


def read_base(report: Report, base: dict[str, Any]) -> None:
    """Add the figures of one process from the report of another run; it is refused where they are of something else."""
    wanted = {**report.conditions, "tensor_parallel": 1}
    for key in ("tensor_parallel", "gpu", "versions", "model", "layers", "dtype", "sum_slices"):
        if base["conditions"].get(key) != wanted.get(key):
            there = base["conditions"].get(key)
            refuse(f"--base: {key} is {there!r} there, and {wanted.get(key)!r} here; give another")
    for name, value in base["figures"].items():
        if name.endswith("_tp1") and "_over_" not in name:
            report.add(name, [value])


def compare(report: Report, scale: Scale, ranks: int) -> None:
    """The figures that follow from others."""
    figures = report.figures
    names = [(f"tp{ranks}_over_tp1_{size}", f"decode_tokens_per_s_{size}") for size in scale.sizes]
    for name, of in [*names, (f"prefill_tp{ranks}_over_tp1", "prefill_tokens_per_s")]:
        many, one = figures.get(f"{of}_tp{ranks}"), figures.get(f"{of}_tp1")
        if many and one:
            report.add(name, [many / one])
    for size in scale.sizes:
        rate, us = figures.get(f"decode_tokens_per_s_{size}_tp{ranks}"), figures.get(f"sum_us_{size}")
        if rate and us:
            each = 2 * int(scale.config["num_hidden_layers"])
            report.add(f"sum_share_{size}", [each * us * rate / size / 1e6])


async def workload(report: Report, scale: Scale, folder: str, rounds: int, values: dict[str, Any]) -> None:
    """Part w."""
    from benchmarks.gpu.engine import engine_config, greedy, one_round

    requests, new = (2, 8) if scale.device == "cpu" else _WORKLOAD
    walls, rates = [], []
    own = dataclasses.replace(scale, sizes=(requests,))
    async with Engine(engine_config(own, folder, requests, new, **values)) as engine:
        for seed in range(rounds + 1):
            # new prompts in each round: prefill is a part of the run
            prompts = scale.prompts(requests, 500 + seed)
            wall, rate = await one_round(engine, prompts, greedy(new), routing=True, steady=True)
            walls.append(wall)
            rates.append(rate)
    report.add("workload_s", walls[1:])
    if found := [rate for rate in rates[1:] if rate]:
        report.add("workload_decode_tokens_per_s", found)


async def measure(parts: Parts, scale: Scale, args: argparse.Namespace, folder: str) -> None:
    """All parts that were asked for, one after the other."""
    ranks, rounds, report = args.tp, 1 if args.tiny else args.rounds, parts.report
    values: dict[str, Any] = {"tensor_parallel": ranks, "max_requests": max(scale.sizes[-1], _PREFILLS)}
    if not args.tiny:
        values["num_blocks"] = "auto"
    if args.sum_slices:
        # which proves them at the start
        scale = dataclasses.replace(scale, runner={**scale.runner, "self_check": True})
        values |= {"numerics": "fixed", "sum_slices": args.sum_slices}
    # one process against itself, and sums of nothing
    if "x" in args.only and ranks > 1:
        await parts.run("exactness", exact, report, scale, ranks)
    if "s" in args.only and ranks > 1 and not args.tiny:
        await parts.run("sums", sums, report, scale, ranks)
    if "d" in args.only:
        await parts.run(f"{ranks} ranks", decode, parts, scale, folder, rounds, values)
    if "w" in args.only:
        await parts.run("the published workload", workload, report, scale, folder, rounds, values)
    if "d" in args.only and ranks > 1:
        if not args.no_base and not args.base:
            one = {**values, "tensor_parallel": 1}
            await parts.run("one process", decode, parts, scale, folder, rounds, one)
        compare(report, scale, ranks)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tp", type=int, choices=(1, 2, 4, 8), default=2, help="ranks of the group")
    parser.add_argument("--model", choices=sorted(MODELS), default=DEFAULT_MODEL, help="whose shape it has")
    parser.add_argument("--only", type=names_of("xsdw"), default="x,s,d,w", help="parts")
    parser.add_argument("--sizes", type=sizes_of, default="1,64,256,512", help="running")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of each figure")
    parser.add_argument("--collectives", choices=("auto", "peers", "nccl"), default="auto", help="how ranks sum")
    parser.add_argument("--sum-slices", type=int, choices=(1, 2, 4), help="fixed numerics in d and w, with such sums")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--no-base", action="store_true", help="no engine of one process")
    base.add_argument(
        "--base", metavar="FILE", type=kept, help="the report of a run with --tp 1: its figures of one process"
    )
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    scale = scale_of(args)
    aims = AIMS.get(args.tp) if args.model == DEFAULT_MODEL else None
    parts = begin(
        f"{args.tp} ranks", args, aims, gpus=args.tp, tensor_parallel=args.tp, collectives=args.collectives,
        sum_slices=args.sum_slices, rounds=args.rounds, parts=sorted(args.only), **scale.facts,
    )  # fmt: skip
    if args.base:
        read_base(parts.report, args.base)
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(measure(parts, scale, args, write_folder(Path(name), scale)))
    return parts.finish()
