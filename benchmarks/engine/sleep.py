"""Sleep and wake: bytes held asleep, and seconds to wake.

An engine with its model in a worker process (`--ranks`: in several, one GPU each). On a GPU the shape of Qwen3-30B-A3B
in bfloat16, weights drawn on the device; on a CPU a small model of that family. Every round sleeps at level 1 while a
request runs, and at level 2. Requests that are played after each wake must have the tokens and expert rows of those
before the first sleep, or the run is void; they go one at a time, so that their steps are the same.

    awake_nbytes        what the engine holds of one GPU, the most of all: used memory as the driver tells it, less what
                        was used before the engine started, so contexts, graphs and kernels are in it. On a CPU: memory
                        that is the worker's alone
    asleep_nbytes_1, asleep_nbytes_2   the same, asleep at level 1 and 2 (aim on one GPU: 2 GB)
    wake_s_1            from the call to the first token of a request that waited (aim: 5)
    wake_s_2            until memory of all parts is there, and no weights (aim: 3)
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from benchmarks.lib.arguments import above_zero, at_least_one, parser_of
from benchmarks.lib.published_shapes import SHAPES
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    Played = tuple[tuple[int, ...], bytes]

_REQUESTS, _PROMPT, _TOKENS = 3, 128, 24
_AIMS = {"asleep_nbytes_1": 2e9, "asleep_nbytes_2": 2e9, "wake_s_1": 5.0, "wake_s_2": 3.0}
_SHAPE = SHAPES["Qwen3-30B-A3B"]
#: a CPU's model: some 200 MB
_SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 4096,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
_SMALL_LAYERS = 4


def used_nbytes(on_gpu: bool, pids: Sequence[int]) -> list[int]:
    """Memory in use of each GPU, by whatever; on a CPU what is a worker's alone: shared arenas and libraries stay."""
    if on_gpu:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) << 20 for line in subprocess.check_output(command, text=True).splitlines()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return [sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_")) for lines in rollups]


def config_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    on_gpu = args.device == "cuda"
    shape = _SHAPE.cut(_SHAPE.most_layers) if on_gpu else {**_SHAPE.cut(_SMALL_LAYERS), **_SMALL}
    (folder / "config.json").write_text(json.dumps(shape))
    own: dict[str, Any] = {"weights": "random", "device": args.device, "self_check": False}
    sizes: dict[str, Any] = {"max_running": 8, "max_step_tokens": 512, "num_blocks": 2048}
    if on_gpu:
        own |= {"dtype": "bfloat16", "sleep": True, "kv_cache_nbytes": int(args.kv_gib * (1 << 30))}
        sizes = {"max_running": 64, "max_step_tokens": 8192}
    return EngineConfig(
        model=str(folder), runner_config=own, tokenizer="none", max_context_tokens=2048, host_blocks=256, seed=1,
        step_deadline_s=120.0, update_deadline_s=300.0, process="worker", tensor_parallel=args.ranks, **sizes,
    )  # fmt: skip


def prompt_of(number: int) -> list[int]:
    return np.random.default_rng(number).integers(10, 4000, _PROMPT).tolist()


def params_of(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def play(engine: Engine) -> list[Played]:
    """Tokens and rows of the requests, one after the other, computed anew."""
    await engine.reset_cache()
    found = []
    for number in range(_REQUESTS):
        (sample,) = (await engine.complete(prompt_of(number), params_of(_TOKENS))).samples
        rows = b"" if sample.routing is None else np.ascontiguousarray(sample.routing.array).tobytes()
        found.append((tuple(sample.token_ids), rows))
    return found


class Rounds:
    """Figures of all rounds, by name.

    Args:
        before: memory in use before the engine started.
        wanted: what `play` must return.
    """

    def __init__(self, engine: Engine, on_gpu: bool, before: list[int], wanted: list[Played]) -> None:
        self.values: dict[str, list[float]] = {}
        self._engine = engine
        self._on_gpu = on_gpu
        self._before = before
        self._wanted = wanted

    def _add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def _add_memory(self, name: str) -> None:
        now = used_nbytes(self._on_gpu, self._engine.worker_pids)
        self._add(name, max(used - before for used, before in zip(now, self._before, strict=True)))

    async def play(self) -> None:
        """Level 1 with a request inside, then level 2."""
        engine = self._engine
        self._add_memory("awake_nbytes")
        async with engine.generate(prompt_of(0), params_of(200)) as stream:
            deltas = aiter(stream)
            for _ in range(8):
                await anext(deltas)
            await engine.sleep(1)
            self._add_memory("asleep_nbytes_1")
        waiting = asyncio.ensure_future(engine.complete(prompt_of(1), params_of(1)))
        await asyncio.sleep(0)
        began = time.perf_counter()
        await engine.wake()
        await waiting
        self._add("wake_s_1", time.perf_counter() - began)
        await self._compare("level 1")
        await engine.sleep(2)
        self._add_memory("asleep_nbytes_2")
        began = time.perf_counter()
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        self._add("wake_s_2", time.perf_counter() - began)
        # the weights, which a trainer would bring
        await engine.wake()
        await self._compare("level 2")

    async def _compare(self, level: str) -> None:
        if await play(self._engine) != self._wanted:
            raise SystemExit(f"after a sleep at {level} requests have other tokens or rows: nothing was measured")


async def measure(args: argparse.Namespace, report: Report) -> None:
    on_gpu = args.device == "cuda"
    before = used_nbytes(on_gpu, ()) or [0] * args.ranks
    with tempfile.TemporaryDirectory() as folder:
        async with Engine(config_of(args, Path(folder))) as engine:
            report.conditions["kv_nbytes"] = engine.capacity.num_blocks * engine.capacity.block_nbytes
            print("  started", file=sys.stderr, flush=True)
            rounds = Rounds(engine, on_gpu, before, await play(engine))
            for _ in range(args.rounds):
                await rounds.play()
    for name, values in rounds.values.items():
        report.add(name, values, aim=_AIMS.get(name) if on_gpu and args.ranks == 1 else None)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of each level")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=1, help="processes of one engine")
    parser.add_argument("--kv-gib", type=above_zero, default=40.0, help="KV on a GPU, in GiB")
    args = parser.parse_args()
    report = Report("Sleep and wake", gpus=args.ranks if args.device == "cuda" else 0)
    report.conditions["ranks"] = args.ranks
    uvloop.run(measure(args, report))
    report.finish(args.json_path)
