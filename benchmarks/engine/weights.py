"""Weights over a process group, against a raw broadcast of as many bytes.

    python -m benchmarks weights                     # gloo, a model of 1 GB, on this machine's CPU
    python -m benchmarks weights --device cuda       # NCCL, Qwen3-30B-A3B's shape: trainer on GPU 0, engine on GPU 1

`group_ratio` is the time of the raw broadcast, between two processes, over that of an update: from the call to the
return of `update_weights`, with its pause and the puts to their places, under `keep`. Both go in turn. `update_stall_s`
is the longest time that requests had no new token, less that between other tokens; `stall_ratio` is it over the raw
broadcast. Tensors have the names of a checkpoint, so experts come one by one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.engine import weights_side
from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.published_shapes import SHAPES
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fdasync import GroupTensors

SHAPE = "Qwen3-30B-A3B"
# a gigabyte of bfloat16, of the same family
SMALL = {
    "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768,
}  # fmt: skip
SMALL_LAYERS = 8
REQUESTS = 4
# tokens before an update, by which the usual time between tokens is known; and after it
BEFORE, AFTER = 12, 4
CALL_S = 600.0


class Side:
    """A process in which functions of `weights_side.py` are called, one at a time."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        running = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        return await asyncio.wait_for(running, CALL_S)


def write_config(folder: Path, device: str) -> None:
    config = SHAPES[SHAPE].cut(SMALL_LAYERS if device == "cpu" else SHAPES[SHAPE].most_layers)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **(SMALL if device == "cpu" else {})}))


def config_of(folder: Path, device: str) -> EngineConfig:
    own: dict[str, Any] = {"weights": "random", "dtype": "bfloat16", "device": device}
    own |= {"num_threads": 1} if device == "cpu" else {"cuda_graphs": False}
    return EngineConfig(
        model=str(folder), runner_config=own, num_blocks=256, max_context_tokens=1024, max_running=REQUESTS,
        max_step_tokens=64, process="worker", update_deadline_s=CALL_S, start_deadline_s=CALL_S,
    )  # fmt: skip


async def raw(trainer: Side, receiver: Side, nbytes: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*[side.call(weights_side.broadcast_raw, nbytes) for side in (trainer, receiver)])
    return time.perf_counter() - began


async def update(engine: Engine, trainer: Side, part: GroupTensors) -> float:
    began = time.perf_counter()
    await asyncio.gather(trainer.call(weights_side.send), engine.update_weights(None, part, "keep"))
    return time.perf_counter() - began


async def stall(engine: Engine, trainer: Side, part: GroupTensors) -> float:
    """The longest pause that a request saw in an update, less its usual time between tokens."""
    ready = [asyncio.Event() for _ in range(REQUESTS)]
    over = asyncio.Event()

    async def one(number: int) -> float:
        params = SamplingParams(max_tokens=900, temperature=1.0, seed=number, ignore_eos=True)
        gaps: list[float] = []
        after = 0
        async with engine.generate([number + 1] * 16, params) as stream:
            last = time.perf_counter()
            async for _ in stream:
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                if len(gaps) == BEFORE:
                    ready[number].set()
                after += over.is_set()
                if after == AFTER:
                    break
        return max(gaps[BEFORE:]) - statistics.median(gaps[1:])

    asked = [asyncio.ensure_future(one(number)) for number in range(REQUESTS)]
    await asyncio.gather(*[event.wait() for event in ready])
    await update(engine, trainer, part)
    over.set()
    return max(await asyncio.gather(*asked))


async def measure(chosen: argparse.Namespace, folder: Path, report: Report) -> None:
    devices = ("cuda:0", "cuda:1") if chosen.device == "cuda" else ("cpu", "cpu")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(config_of(folder, devices[1])))
        trainer, receiver = Side(stack), Side(stack)
        told: weights_side.Told = await trainer.call(weights_side.start_trainer, folder, devices[0])
        await receiver.call(weights_side.start_receiver, devices[1])
        await asyncio.gather(trainer.call(weights_side.join_engine), engine.join_weights_group(told.engine))
        sides = enumerate((trainer, receiver))
        await asyncio.gather(*[side.call(weights_side.join_raw, told.raw, rank, told.nbytes) for rank, side in sides])
        report.conditions |= {
            "nbytes": told.nbytes,
            "tensors": len(told.part.tensors),
            "bucket_nbytes": told.part.bucket_nbytes,
        }
        # NCCL's ranks meet at the first broadcast, and memory is touched
        await raw(trainer, receiver, told.nbytes)
        await update(engine, trainer, told.part)
        raws, updates = [], []
        for _ in range(chosen.pairs):
            raws.append(await raw(trainer, receiver, told.nbytes))
            updates.append(await update(engine, trainer, told.part))
        stalls = [await stall(engine, trainer, told.part) for _ in range(chosen.stalls)]
    raw_s = statistics.median(raws)
    report.add("raw_gb_s", [told.nbytes / 1e9 / one for one in raws])
    report.add("update_gb_s", [told.nbytes / 1e9 / one for one in updates])
    report.add("group_ratio", [raw_s / statistics.median(updates)], aim=0.8)
    report.add("update_stall_s", stalls)
    report.add("stall_ratio", [statistics.median(stalls) / raw_s], aim=1.3)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=at_least_one, default=9, help="raw broadcasts and updates, in turn")
    parser.add_argument("--stalls", type=at_least_one, default=5, help="updates under requests")
    chosen = parser.parse_args()
    report = Report("weights over a process group", gpus=2 if chosen.device == "cuda" else 0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write_config(folder, chosen.device)
        uvloop.run(measure(chosen, folder, report))
    report.finish(chosen.json_path)
