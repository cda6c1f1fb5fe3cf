"""A model with recurrent layers on a GPU: its decode's floor, the first token of a hit, what snapshots take and bring.

    python -m benchmarks gpu_hybrid [--json FILE] [--only a,b,c] [--layers 16] [--sizes 1,64,256] [--quick] [--tiny]

The shape of Qwen3-Next-80B-A3B in bfloat16, with weights drawn on the device; `--layers` of its 48 (a multiple of 4).

a   `floor_share_N`: the time that the bytes of a decode step would take at the rate of a large copy on the same device,
    over the measured step, of N sequences with 1,024 tokens each. Bytes: dense weights and shared experts once, the
    experts that N tokens are expected to choose, KV of all contexts, and each sequence's recurrent state twice, as it
    is read and written. Steps are those of `gpu_serving`, driven by hand. `prefill_tokens_per_s`: steps of 8 prompts.
b   `hit_over_recomputed`: seconds to the first token of a prompt of 8,192 tokens that was sent before, over those of
    new ones; the whole engine in this process, medians.
c   `hit_share_S` for S places of snapshots: of the tokens of prompts, those that came from the cache, where 96
    conversations of 6 turns take turns at random (a shared preface of 1,000 tokens, 300 new tokens and an answer of 64
    in each turn). `hit_share_all`: if all that was computed before were kept. The scheduler alone decides this: the
    model is the synthetic one with a recurrent state, on the CPU, and KV has room for all. `snapshot_gb_per_mtoken`:
    bytes of the snapshots held at the end for each million tokens of KV, by the shape's true sizes;
    `snapshots_over_kv`: over the bytes of that KV.

`--tiny` rehearses a and b on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from benchmarks.gpu.models import HYBRID_MODEL, MODELS
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from benchmarks.lib.report import Report

if TYPE_CHECKING:
    from fdasync import Engine

_PREFACE, _TURNS, _ASKED, _ANSWER = 1000, 6, 300, 64
_BLOCK = 16


async def decode(scale: Scale, folder: str, report: Report) -> None:
    """Part a."""
    from benchmarks.gpu import decode as serving
    from benchmarks.gpu.model import Rig

    rig = await Rig.open(scale, folder, ["on"], print)
    try:
        report.conditions["state_nbytes"] = rig.capacity.snapshot_nbytes
        await serving.begin(rig, report)
        gc.collect()
        gc.freeze()
        found = {}
        for count in reversed(scale.sizes):
            found[count] = await serving.compare(rig, report, ["on"], count)
        rate = serving.copy_bytes_per_s(rig.device, scale.copy_nbytes)
        report.add("copy_gbps", [rate / 1e9])
        serving.floor(rig, report, found, rate)
    finally:
        gc.unfreeze()
        await rig.close()


async def hit(scale: Scale, folder: str, report: Report, tokens: int, rounds: int) -> None:
    """Part b."""
    from fdasync import Engine, EngineConfig

    config = EngineConfig(
        model=folder, runner="transformers", runner_config={**scale.runner_config((1, 2)), "graph_sizes": [1, 2]},
        tokenizer="none", routing=True, process="inline", block_tokens=scale.block_tokens, max_running=2,
        num_blocks=(2 * rounds + 2) * tokens // scale.block_tokens, num_snapshots=8 * rounds,
        max_context_tokens=tokens + scale.block_tokens, max_step_tokens=tokens,
    )  # fmt: skip
    drawn = np.random.default_rng(5)
    prompts = [drawn.integers(10, scale.config["vocab_size"] - 10, tokens).tolist() for _ in range(rounds + 1)]
    fresh, again = [], []
    async with Engine(config) as engine:
        # the first one compiles
        await first_token_s(engine, prompts[0])
        await first_token_s(engine, prompts[0])
        for prompt in prompts[1:]:
            fresh.append(await first_token_s(engine, prompt))
            again.append(await first_token_s(engine, prompt))
        hits = engine.stats().scheduler.hit_tokens
    report.conditions["hit_tokens"] = hits / (rounds + 1)
    report.add("recomputed_first_token_ms", [value * 1e3 for value in fresh])
    report.add("hit_first_token_ms", [value * 1e3 for value in again])
    report.add("hit_over_recomputed", [statistics.median(again) / statistics.median(fresh)], aim=0.2)


async def first_token_s(engine: Engine, prompt: list[int]) -> float:
    from fdasync import SamplingParams

    began = time.perf_counter()
    await engine.complete(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - began


async def turns(report: Report, conversations: int, every_tokens: int, state_nbytes: int, kv_nbytes: int) -> None:
    """Part c. `kv_nbytes`: of a token."""
    for places in (conversations // 3, conversations, 3 * conversations):
        share, every, held, tokens = await converse(conversations, places, every_tokens)
        report.add(f"hit_share_{places}", [share])
        report.conditions[f"snapshots_held_{places}"] = held
        per_token = held * state_nbytes / tokens
        report.add(f"snapshot_gb_per_mtoken_{places}", [per_token * 1e6 / 1e9])
        report.add(f"snapshots_over_kv_{places}", [per_token / kv_nbytes])
    report.add("hit_share_all", [every])


async def converse(conversations: int, places: int, every_tokens: int) -> tuple[float, float, int, int]:
    """Shares of prompt tokens that came from the cache, and that could have; snapshots at the end, tokens of KV."""
    from fdasync import Engine, EngineConfig, SamplingParams

    drawn = np.random.default_rng(11)
    preface = drawn.integers(1, 250, _PREFACE).tolist()
    longest = _PREFACE + _TURNS * (_ASKED + _ANSWER) + _BLOCK
    num_blocks = conversations * -(-longest // _BLOCK)
    config = EngineConfig(
        runner="synthetic", runner_config={"state_words": 4}, tokenizer="none", process="inline", block_tokens=_BLOCK,
        num_blocks=num_blocks, num_snapshots=places, state_every_tokens=every_tokens, max_running=8,
        max_context_tokens=longest, max_step_tokens=2048,
    )  # fmt: skip
    histories = [list(preface) for _ in range(conversations)]
    order = np.repeat(np.arange(conversations), _TURNS)
    drawn.shuffle(order)
    possible = asked = 0
    limit = asyncio.Semaphore(8)
    params = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
    async with Engine(config) as engine:

        async def turn(number: int, new: list[int]) -> None:
            async with limit:
                history = histories[number]
                history += new
                result = await engine.complete(list(history), params)
                history += result.samples[0].token_ids

        # a conversation's turns come one after the other
        waiting: dict[int, asyncio.Task[None]] = {}
        for index, number in enumerate(order.tolist()):
            if number in waiting:
                await waiting.pop(number)
            before = len(histories[number])
            possible += (before if before > _PREFACE or index else 0) // _BLOCK * _BLOCK
            asked += before + _ASKED
            task = asyncio.create_task(turn(number, drawn.integers(1, 250, _ASKED).tolist()))
            waiting[number] = task
            if len(waiting) > 16:
                await waiting.pop(next(iter(waiting)))
        await asyncio.gather(*waiting.values())
        stats = engine.stats().scheduler
    held = stats.num_snapshots - stats.free_snapshots
    tokens = (num_blocks - stats.free_blocks) * _BLOCK
    return stats.hit_tokens / asked, possible / asked, held, tokens


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--only", metavar="PARTS", default="a,b,c", help="of a, b, c (default: all)")
    parser.add_argument("--layers", type=int, help=f"of the model (default {MODELS[HYBRID_MODEL].layers})")
    parser.add_argument("--sizes", metavar="N,N", help="running sequences (default 1,64,256)")
    parser.add_argument("--quick", action="store_true", help="3 stretches of 0.2 s: a look")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args()
    args.parts = {part.strip() for part in args.only.split(",") if part.strip()}
    if not args.parts or args.parts - set("abc"):
        parser.error(f"--only names {args.only!r}, parts are a, b, c")
    return args


def scale_of(args: argparse.Namespace) -> Scale:
    scale = (tiny if args.tiny else large)(HYBRID_MODEL)
    changes: dict[str, Any] = {}
    if args.layers is not None:
        changes["config"] = MODELS[HYBRID_MODEL].shape.cut(args.layers)
    if args.quick:
        changes |= {"pairs": 3, "side_pairs": 2, "seconds": 0.2}
    if args.sizes:
        changes["sizes"] = tuple(sorted({int(size) for size in args.sizes.split(",")}))
    return dataclasses.replace(scale, **changes)


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import transformers

    if args.parts & {"a", "b"} and not args.tiny and not torch.cuda.is_available():
        raise SystemExit("parts a and b measure a CUDA GPU, and torch sees none here; --tiny rehearses on a CPU")
    scale = scale_of(args)
    report = Report("A model with recurrent layers on a GPU")
    report.conditions |= {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": scale.model,
        "layers": scale.config["num_hidden_layers"],
        "sizes": scale.sizes,
        "context": scale.context,
        "pairs": scale.pairs,
        "stretch_s": scale.seconds,
    }
    if args.tiny:
        report.conditions["void"] = "a rehearsal on a CPU: no figure of parts a and b says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), scale)
        if "a" in args.parts:
            uvloop.run(decode(scale, folder, report))
            gc.collect()
        if "b" in args.parts:
            tokens, rounds = (32, 1) if args.tiny else (8192, 3 if args.quick else 6)
            uvloop.run(hit(scale, folder, report, tokens, rounds))
    if "c" in args.parts:
        # of the whole model: its state, its KV in bfloat16, and as many tokens as have KV of the state's bytes
        uvloop.run(turns(report, 6 if args.tiny else 96, 3168, 77_856_768, 24_576))
    report.finish(args.json)
