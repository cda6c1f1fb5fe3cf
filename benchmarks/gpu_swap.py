"""Swapping KV between device and host on a GPU: what it costs decodes, and what a hit on the host saves.

    python -m benchmarks.gpu_swap [--json FILE] [--rounds 5] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the device, blocks of 16 tokens (1.5 MiB).

    decode_beside_out, _in, _both   tokens per second of 32 sequences at 1,024 tokens, by hand-driven steps with two in
                                    flight, while calls of 64 blocks are copied out, in or both all the time, over the
                                    same without; `swap_gbps_out` and so on: what was copied meanwhile. GB/s of copies
                                    alone, against one large pinned copy: `benchmarks.gpu_copies`.
    ttft_ms_compute_N, _device_N, _host_N   from the call to the reply of one token, whole engine with its model in a
                                    worker: a prompt of N tokens that nobody sent before, again at once, and again after
                                    others have taken its device blocks. `host_hit_over_compute_N`, `device_hit_...`.
    swapped_row_bytes               routing rows that swaps moved: 0, as rows stay in their slots.

Stretches and rounds take turns; medians. Needs a CUDA GPU with 100 GiB; `--tiny` rehearses in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import uvloop

from benchmarks._gpu_decode import add_ratio, begin, stretch
from benchmarks._gpu_model import Rig
from benchmarks._gpu_scale import Scale, tiny, write_folder
from benchmarks._report import Report
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.cache.host_arena import HostArena
from fdasync.events.catalog import SwapDone
from fdasync.gpu.block_copies import BlockCopies

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Sequence

_AT_ONCE = 64
_WAYS = {"alone": (), "out": ("out",), "in": ("in",), "both": ("out", "in")}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


async def beside_decodes(scale: Scale, folder: str, report: Report, rounds: int) -> None:
    """Decode by hand, with block copies on their own streams."""
    running = scale.sizes[0]
    rig = await Rig.open(scale, folder, ["on"], say)
    arm = rig.arms["on"]
    host = HostArena.create(2 * _AT_ONCE, rig.pool.blocks.view(torch.uint8).shape[1])
    host.kv[:] = 1
    copies = BlockCopies(rig.pool.blocks, host, rig.services.streams, rig.services.events, rig.services.port)
    try:
        await begin(rig, report)
        sources = [block for key in range(running) for block in rig.blocks[key][: scale.context // scale.block_tokens]]
        # blocks of sequences that do not run
        targets = [block for key in range(running, scale.sizes[-1]) for block in rig.blocks[key]]
        await arm.shrink(running)
        steps = scale.most_steps - scale.lead - 1
        rates: dict[str, list[float]] = {way: [] for way in _WAYS}
        moved: dict[str, list[float]] = {way: [] for way in _WAYS}
        for turn in range(-1, rounds):
            for way, verbs in _WAYS.items() if turn % 2 else reversed(_WAYS.items()):
                counts = [0]
                loops = [asyncio.ensure_future(_keep_on(copies, verb, sources, targets, counts)) for verb in verbs]
                began = time.perf_counter()
                took_s = await stretch(arm, 2, scale.lead, steps)
                whole_s = time.perf_counter() - began
                for task in loops:
                    task.cancel()
                if loops:
                    await asyncio.wait(loops)
                if turn >= 0:
                    rates[way].append(running * steps / took_s)
                    moved[way].append(counts[0] / whole_s / 1e9)
        for way in _WAYS:
            report.add(f"decode_tokens_per_s_{way}", rates[way])
            if way != "alone":
                add_ratio(report, f"decode_beside_{way}", rates[way], rates["alone"])
                report.add(f"swap_gbps_{way}", moved[way])
    finally:
        await copies.aclose()
        await rig.close()
        host.close()


async def _keep_on(
    copies: BlockCopies, verb: str, sources: Sequence[int], targets: Sequence[int], counts: list[int]
) -> None:
    """Copy block after block until cancelled; a call that was given away goes on to its end."""
    at_once = min(_AT_ONCE, len(sources), len(targets))
    device = itertools.cycle(sources if verb == "out" else targets)
    places = list(range(at_once)) if verb == "out" else list(range(_AT_ONCE, _AT_ONCE + at_once))
    while True:
        blocks = list(itertools.islice(device, at_once))
        move = copies.out(blocks, places) if verb == "out" else copies.back(places, blocks)
        counts[0] += await asyncio.shield(move)


async def first_tokens(scale: Scale, folder: str, report: Report, rounds: int, lengths: Sequence[int]) -> None:
    """Whole engine: what a prompt costs that is computed, on the device, or on the host."""
    size = scale.block_tokens
    longest = max(lengths)
    num_blocks = 2 * (longest // size) + 2
    config = EngineConfig(
        model=folder,
        runner_config=scale.runner_config((1, 2)),
        tokenizer="none",
        block_tokens=size,
        num_blocks=num_blocks,
        host_blocks=8 * (longest // size),
        max_running=2,
        max_step_tokens=longest,
        max_context_tokens=longest + size,
    )
    random = np.random.default_rng(5)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(10, scale.config["vocab_size"] - 10, length)]

    async with Engine(config) as engine, engine.bus.subscribe(SwapDone) as swaps:
        counting = asyncio.ensure_future(_count_rows(swaps, report))
        for _ in range(3):
            await engine.complete(prompt(longest), ONE)
        for length in lengths:
            took: dict[str, list[float]] = {"compute": [], "device": [], "host": []}
            for _ in range(rounds):
                asked = prompt(length)
                for tier in took:
                    if tier == "host":
                        for _ in range(3):
                            await engine.complete(prompt(longest), ONE)
                    began = time.perf_counter()
                    result = await engine.complete(asked, ONE)
                    took[tier].append((time.perf_counter() - began) * 1e3)
                    found = {"compute": length - result.cached.total}
                    found |= {"device": result.cached.device, "host": result.cached.host}
                    if found[tier] < length - size:
                        raise RuntimeError(f"a prompt of {length} tokens for {tier}: {result.cached}")
            for tier, values in took.items():
                report.add(f"ttft_ms_{tier}_{length}", values)
            for tier in ("device", "host"):
                add_ratio(report, f"{tier}_hit_over_compute_{length}", took[tier], took["compute"])
    # the bus closed with the engine: the count is whole
    report.add("swapped_row_bytes", [await counting], aim=0)


async def _count_rows(swaps: AsyncIterable[Any], report: Report) -> int:
    rows = copied = 0
    async for swap in swaps:
        rows += swap.aux_nbytes
        copied += swap.kv_nbytes
    report.conditions["swapped_kv_nbytes"] = copied
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every part")
    parser.add_argument("--rounds", type=int, default=5, help="of every stretch and prompt (default 5)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_swap needs a CUDA GPU, and torch sees none")
    scale, lengths = (
        (dataclasses.replace(tiny(), most_steps=8), (32,))
        if args.tiny
        else (Scale(sizes=(32, 64), most_steps=40), (8192, 1024))
    )
    report = Report("Swapping between device and host on a GPU")
    report.conditions |= {"torch": torch.__version__, "rounds": args.rounds, "dtype": scale.dtype}
    if torch.cuda.is_available():
        report.conditions["gpu"] = torch.cuda.get_device_name()
    if args.tiny:
        report.conditions["void"] = "a rehearsal in an interpreter"
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), scale)
        for part in (
            lambda: beside_decodes(scale, folder, report, args.rounds),
            lambda: first_tokens(scale, folder, report, args.rounds, lengths),
        ):
            try:
                uvloop.run(_call(part))
            except Exception as error:  # the other part's figures count all the same
                failed = True
                report.conditions.setdefault("errors", []).append(f"{type(error).__name__}: {error}")
                print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if args.json:
                found = {"figures": report.figures, "conditions": report.conditions}
                Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    report.finish(args.json)
    sys.exit(1 if failed else 0)


async def _call(part: Any) -> None:
    await part()


if __name__ == "__main__":
    main()
