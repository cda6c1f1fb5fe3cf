"""Weights over a process group, against a raw broadcast of as many bytes.

    python -m benchmarks weights                     # gloo, a model of 1 GB, on this machine's CPU
    python -m benchmarks weights --device cuda       # NCCL, Qwen3-30B-A3B's shape: trainer on GPU 0, engine on GPU 1

`group_ratio` is the time of the raw broadcast, between two processes, over that of an update: from the call to the
return of `update_weights`, with its pause and the puts to their places, under `keep`. Both go in turn. `update_stall_s`
is the longest time that requests had no new token, less that between other tokens; `stall_ratio` is it over the raw
broadcast. Tensors have the names of a checkpoint, so experts come one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from fdasync_transformers.weights.groups.sending import BUCKET_NBYTES, GPU_BUCKET_NBYTES

from benchmarks.engine.weights_side import metas_of, tensors_of
from benchmarks.lib.published_shapes import SHAPES
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, GroupTensors, SamplingParams, WeightsGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SHAPE = "Qwen3-30B-A3B"
# a gigabyte of bfloat16, of the same family
SMALL = {
    "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768,
}  # fmt: skip
SMALL_LAYERS = 8
PAIRS, STALLS, REQUESTS = 9, 5, 4
# tokens before an update, by which the usual time between tokens is known; and after it
BEFORE, AFTER = 12, 4
CALL_S = 600.0


class Side:
    """A child of `weights_side.py`."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self._process = process
        self.hello = hello

    @classmethod
    @asynccontextmanager
    async def running(cls, role: str, folder: Path, device: str, bucket_nbytes: int) -> AsyncIterator[Side]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.engine.weights_side", role, str(folder), device, str(bucket_nbytes),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            side = cls(process, {})
            side.hello = await side.line()
            yield side
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), CALL_S)
        if not line:
            raise RuntimeError("a side ended; what it said stands above")
        return dict(json.loads(line))

    async def do(self, what: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.line()


def write_config(folder: Path, *, small: bool) -> None:
    config = SHAPES[SHAPE].cut(SMALL_LAYERS if small else SHAPES[SHAPE].most_layers)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **(SMALL if small else {})}))


def config_of(folder: Path, device: str) -> EngineConfig:
    own: dict[str, Any] = {"weights": "random", "dtype": "bfloat16", "device": device}
    own |= {"num_threads": 1} if device == "cpu" else {"cuda_graphs": False}
    return EngineConfig(
        model=str(folder), runner_config=own, num_blocks=256, max_context_tokens=1024, max_running=REQUESTS,
        max_step_tokens=64, process="worker", update_deadline_s=CALL_S, start_deadline_s=CALL_S,
    )  # fmt: skip


async def raw(trainer: Side, receiver: Side) -> float:
    began = time.perf_counter()
    await asyncio.gather(trainer.do("raw"), receiver.do("raw"))
    return time.perf_counter() - began


async def update(engine: Engine, trainer: Side, part: GroupTensors) -> float:
    began = time.perf_counter()
    await asyncio.gather(trainer.do("send"), engine.update_weights(None, part, "keep"))
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
    on_gpu = chosen.device == "cuda"
    devices = ("cuda:0", "cuda:1") if on_gpu else ("cpu", "cpu")
    bucket = chosen.bucket_mib << 20 if chosen.bucket_mib else (GPU_BUCKET_NBYTES if on_gpu else BUCKET_NBYTES)
    tensors = tensors_of(folder)
    part = GroupTensors(group="engine", tensors=metas_of(tensors), bucket_nbytes=bucket)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(config_of(folder, devices[1])))
        trainer = await stack.enter_async_context(Side.running("trainer", folder, devices[0], bucket))
        receiver = await stack.enter_async_context(Side.running("receiver", folder, devices[1], bucket))
        group = msgspec.convert(trainer.hello["engine"], WeightsGroup)
        await asyncio.gather(trainer.do("join"), engine.join_weights_group(group))
        await asyncio.gather(trainer.do("join raw"), receiver.do("join raw", group={**trainer.hello["raw"], "rank": 1}))
        nbytes = trainer.hello["nbytes"]
        report.conditions |= {"nbytes": nbytes, "tensors": len(tensors), "bucket_nbytes": bucket}
        # NCCL's ranks meet at the first broadcast, and memory is touched
        await raw(trainer, receiver)
        await update(engine, trainer, part)
        pairs = [(await raw(trainer, receiver), await update(engine, trainer, part)) for _ in range(chosen.pairs)]
        raw_s = statistics.median(one for one, _ in pairs)
        report.add("raw_gb_s", [nbytes / 1e9 / one for one, _ in pairs])
        report.add("update_gb_s", [nbytes / 1e9 / other for _, other in pairs])
        update_s = statistics.median(other for _, other in pairs)
        report.add("group_ratio", [raw_s / update_s], aim=0.8)
        stalls = [await stall(engine, trainer, part) for _ in range(chosen.stalls)]
        report.add("update_stall_s", stalls)
        report.add("stall_ratio", [statistics.median(stalls) / raw_s], aim=1.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="the model of 1 GB on GPUs, too")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--stalls", type=int, default=STALLS)
    parser.add_argument("--bucket-mib", type=int, default=0, help="of a bucket; 0: the sender's own choice")
    parser.add_argument("--json", help="write figures and conditions there")
    chosen = parser.parse_args()
    report = Report("weights over a process group")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write_config(folder, small=chosen.small or chosen.device == "cpu")
        uvloop.run(measure(chosen, folder, report))
    report.conditions["devices"] = _devices() if chosen.device == "cuda" else [f"{os.cpu_count()} CPUs"]
    report.finish(chosen.json)


def _devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
