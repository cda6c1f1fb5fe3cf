"""A model with recurrent layers on a GPU: its decode's floor, the first token of a hit, what snapshots bring.

    python -m benchmarks gpu_hybrid [--json FILE] [--only a,b,c] [--sizes 1,64,256] [--quick] [--tiny]

The shape of Qwen3-Next-80B-A3B in bfloat16, 16 of its 48 layers, with weights drawn on the device.

a   `floor_share_N`: the time that the bytes of a decode step would take at the rate of a large copy on the same device,
    over the measured step, of N sequences with 1,024 tokens each. Bytes: dense weights and shared experts once, the
    experts that N tokens are expected to choose, KV of all contexts, and each sequence's recurrent state twice, as it
    is read and written. Steps are those of `gpu_serving`, driven by hand: `decode_tokens_per_s_N_on`.
    `prefill_tokens_per_s`: steps of 8 prompts.
b   `hit_over_recomputed`: seconds to the first token of a prompt of 8,192 tokens that was sent before, over those of
    new ones; the whole engine in this process, medians.
c   `hit_share_S` for S places of snapshots: of the tokens of prompts, those that came from the cache, where 96
    conversations of 6 turns take turns at random (a shared preface of 1,000 tokens, 300 new tokens and an answer of 64
    in each turn). `hit_share_all`: if all that was computed before were kept. The scheduler alone decides this: the
    model is the synthetic one with a recurrent state, on the CPU, and KV has room for all.

`--tiny` rehearses a and b, and c with 6 conversations.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from benchmarks.gpu.models import HYBRID_MODEL
from benchmarks.gpu.options import begin, parser_of, sizes_of
from benchmarks.gpu.scale import AIMS, Scale, large, tiny, write_folder
from benchmarks.lib.arguments import names_of
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    import argparse

    from benchmarks.lib.parts import Parts
    from benchmarks.lib.report import Report

_PREFACE, _TURNS, _ASKED, _ANSWER = 1000, 6, 300, 64
_BLOCK = 16
# tokens that have as many bytes of KV as a state has
_EVERY_TOKENS = 3168


async def decode(parts: Parts, scale: Scale, folder: str) -> None:
    """Part a."""
    from benchmarks.gpu import decode as by_hand

    async with by_hand.opened(parts, scale, folder) as rig:
        rate = by_hand.copy_bytes_per_s(rig, parts.report)
        for count in reversed(scale.sizes):
            await by_hand.compare(rig, parts.report, count, rate)


async def hit(report: Report, scale: Scale, folder: str, tokens: int, rounds: int) -> None:
    """Part b."""
    config = EngineConfig(
        model=folder, runner_config=scale.runner_config((1, 2)), routing=True,
        tokenizer="none", process="inline", block_tokens=scale.block_tokens, max_running=2,
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
        report.conditions["hit_tokens"] = engine.stats().scheduler.hit_tokens / (rounds + 1)
    report.add("recomputed_first_token_ms", [value * 1e3 for value in fresh])
    report.add("hit_first_token_ms", [value * 1e3 for value in again])
    report.add("hit_over_recomputed", [statistics.median(again) / statistics.median(fresh)])


async def first_token_s(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    await engine.complete(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - began


async def turns(report: Report, conversations: int) -> None:
    """Part c."""
    for places in (conversations // 3, conversations, 3 * conversations):
        share, every = await converse(conversations, places)
        report.add(f"hit_share_{places}", [share])
    report.add("hit_share_all", [every])


async def converse(conversations: int, places: int) -> tuple[float, float]:
    """Shares of prompt tokens that came from the cache, and that could have."""
    drawn = np.random.default_rng(11)
    preface = drawn.integers(1, 250, _PREFACE).tolist()
    longest = _PREFACE + _TURNS * (_ASKED + _ANSWER) + _BLOCK
    config = EngineConfig(
        runner="synthetic", runner_config={"state_words": 4}, tokenizer="none", process="inline", block_tokens=_BLOCK,
        num_blocks=conversations * -(-longest // _BLOCK), num_snapshots=places, state_every_tokens=_EVERY_TOKENS,
        max_running=8, max_context_tokens=longest, max_step_tokens=2048,
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
        found = engine.stats().scheduler.hit_tokens
    return found / asked, possible / asked


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=names_of("abc"), default="a,b,c", help="parts")
    parser.add_argument("--sizes", type=sizes_of, metavar="N,N", help="running sequences (default 1,64,256)")
    parser.add_argument("--quick", action="store_true", help="3 stretches of 0.2 s: a look")
    return parser.parse_args(arguments)


async def measure(parts: Parts, scale: Scale, folder: str, args: argparse.Namespace) -> None:
    if "a" in args.only:
        await parts.run("decode", decode, parts, scale, folder)
    if "b" in args.only:
        tokens, rounds = (32, 1) if args.tiny else (8192, 3 if args.quick else 6)
        await parts.run("hits", hit, parts.report, scale, folder, tokens, rounds)
    if "c" in args.only:
        await parts.run("conversations", turns, parts.report, 6 if args.tiny else 96)


def main() -> int:
    args = parse()
    changes: dict[str, Any] = {"pairs": 3, "seconds": 0.2} if args.quick else {}
    if args.sizes:
        changes["sizes"] = args.sizes
    scale = dataclasses.replace((tiny if args.tiny else large)(HYBRID_MODEL), **changes)
    # part c needs none
    gpus = 1 if args.only & {"a", "b"} else 0
    stretches: dict[str, Any] = {"pairs": scale.pairs, "stretch_s": scale.seconds}
    parts = begin("Recurrent layers on a GPU", args, AIMS[HYBRID_MODEL], gpus=gpus, **stretches, **scale.facts)
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(measure(parts, scale, write_folder(Path(name), scale), args))
    return parts.finish()
