"""Sleep and wake: bytes held asleep, seconds to wake, and whether what follows is what came before.

    python -m benchmarks sleep [--json FILE] [--device cpu|cuda] [--model NAME] [--rounds 3] [--ranks 1] [--kv-gib 40]

An engine with its model in a worker process (`--ranks`: in several, one GPU each). On a GPU the shape of Qwen3-30B-A3B
(`--model`: others of `gpu_serving`) in bfloat16, weights drawn on the device; on a CPU a small model of that family.
Every round plays requests, sleeps while one of them runs, wakes, and plays them again:

`awake_nbytes`, `asleep_nbytes_1`, `_2`: what the engine holds of the device before a sleep, and asleep at level 1 and
2: used memory of all its GPUs as the driver tells it (NVML), less what was used before the engine started, so contexts,
graphs and kernels are in it. On a CPU: resident memory of the worker, less that before the first model was loaded is
not known, so all of it.
`sleep_s_1_pins`: a sleep of level 1 that finds and pins host memory for the weights, as the first one does, and the
first one after a sleep of level 2, which frees that memory; `sleep_s_1`: the next one. `wake_s_1`: from the call to the
first token of the request that had waited. `sleep_s_2`; `wake_s_2`: memory of all parts is there, and no weights;
`reload_s_2`: they are drawn (on a GPU) or loaded again, the transfer that a trainer would make.
`same_1`, `same_2`: the share of requests whose tokens and expert rows are those of before the sleep. Requests are
played one at a time, so their steps are the same.

Aims, for the default model on one H200: less than 2 GB asleep at either level, awake from level 1 in 5 s, from level 2
in 3 s plus the transfer. The exit status is 1 where requests differ or, on that GPU, an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from benchmarks.gpu.models import DEFAULT_MODEL, MODELS
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

_REQUESTS, _PROMPT, _TOKENS = 3, 128, 24
_AIMS = {"asleep_nbytes_1": 2e9, "asleep_nbytes_2": 2e9, "wake_s_1": 5.0, "wake_s_2": 3.0}
#: a CPU's model: some 200 MB
_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class _Gpus:
    """Used memory of GPUs, as the driver's library tells it; this process takes none."""

    def __init__(self, count: int) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check("nvmlInit_v2", self._library.nvmlInit_v2())
        self._count = count
        self._before = [0] * count
        self._before = self._used()

    def _used(self) -> list[int]:
        found = []
        for index in range(self._count):
            handle, told = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
            status = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            self._check("nvmlDeviceGetHandleByIndex_v2", status)
            self._check("nvmlDeviceGetMemoryInfo", self._library.nvmlDeviceGetMemoryInfo(handle, told))
            # total, free, used
            found.append(int(told[2]))
        return found

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{name} says {status}")

    def held(self, _pids: Sequence[int]) -> int:
        """The most of one GPU: each rank has its own."""
        return max(used - before for used, before in zip(self._used(), self._before, strict=True))


class _Host:
    """Resident memory of the workers."""

    def held(self, pids: Sequence[int]) -> int:
        lines = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
        # what is only theirs: shared arenas and libraries stay
        return max(
            sum(int(line.split()[1]) << 10 for line in some if line.startswith(("Private_", "Private-")))
            for some in lines
        )


def _config(args: argparse.Namespace, folder: Path) -> EngineConfig:
    on_gpu = args.device == "cuda"
    shape: dict[str, Any] = MODELS[args.model].config()
    if not on_gpu:
        shape = {**MODELS[DEFAULT_MODEL].config(), **_SMALL}
    (folder / "config.json").write_text(json.dumps(shape))
    own: dict[str, Any] = {"weights": "random", "device": args.device, "self_check": False}
    sizes: dict[str, Any] = {"num_blocks": 2048}
    if on_gpu:
        own |= {"dtype": "bfloat16", "sleep": True, "kv_cache_nbytes": int(args.kv_gib * (1 << 30))}
        sizes = {}
    if args.ranks > 1:
        sizes["tensor_parallel"] = args.ranks
    else:
        sizes["process"] = "worker"
    return EngineConfig(
        model=str(folder), runner_config=own, tokenizer="none", max_context_tokens=2048, host_blocks=256,
        max_running=64 if on_gpu else 8, max_step_tokens=8192 if on_gpu else 512, seed=1, step_deadline_s=120.0,
        update_deadline_s=300.0, **sizes,
    )  # fmt: skip


async def _play(engine: Engine) -> list[tuple[tuple[int, ...], bytes]]:
    """Tokens and rows of the requests, one after the other, computed anew."""
    await engine.reset_cache()
    found = []
    for number in range(_REQUESTS):
        result = await engine.complete(_prompt(number), _params())
        (sample,) = result.samples
        rows = b"" if sample.routing is None else np.ascontiguousarray(sample.routing.array).tobytes()
        found.append((tuple(sample.token_ids), rows))
    return found


def _prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(10, 4000, _PROMPT).tolist()


def _params(tokens: int = _TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class _Round:
    """Figures of rounds."""

    def __init__(self, engine: Engine, memory: _Gpus | _Host, wanted: list[tuple[tuple[int, ...], bytes]]) -> None:
        self.values: dict[str, list[float]] = {}
        self._engine = engine
        self._memory = memory
        self._wanted = wanted

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def add_memory(self, name: str) -> None:
        self.add(name, self._memory.held(self._engine.worker_pids))

    async def compare(self, name: str) -> None:
        found = await _play(self._engine)
        same = [one == other for one, other in zip(found, self._wanted, strict=True)]
        self.add(name, sum(same) / len(same))

    async def play(self) -> None:
        """Level 1 with a request inside, level 1 once more, then level 2."""
        engine = self._engine
        self.add_memory("awake_nbytes")
        async with engine.generate(_prompt(0), _params(200)) as stream:
            deltas = aiter(stream)
            for _ in range(8):
                await anext(deltas)
            began = time.perf_counter()
            await engine.sleep(1)
            self.add("sleep_s_1_pins", time.perf_counter() - began)
            self.add_memory("asleep_nbytes_1")
            while True:
                # what came before the sleep
                try:
                    await asyncio.wait_for(anext(deltas), 0.2)
                except TimeoutError:
                    break
        asked = asyncio.ensure_future(engine.complete(_prompt(1), _params(1)))
        await asyncio.sleep(0)
        began = time.perf_counter()
        await engine.wake()
        await asked
        self.add("wake_s_1", time.perf_counter() - began)
        began = time.perf_counter()
        await engine.sleep(1)
        self.add("sleep_s_1", time.perf_counter() - began)
        await engine.wake()
        await self.compare("same_1")
        began = time.perf_counter()
        await engine.sleep(2)
        self.add("sleep_s_2", time.perf_counter() - began)
        self.add_memory("asleep_nbytes_2")
        began = time.perf_counter()
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        self.add("wake_s_2", time.perf_counter() - began)
        began = time.perf_counter()
        await engine.wake()
        self.add("reload_s_2", time.perf_counter() - began)
        await self.compare("same_2")


async def _measure(args: argparse.Namespace, report: Report) -> bool:
    on_gpu = args.device == "cuda"
    memory = _Gpus(args.ranks) if on_gpu else _Host()
    with tempfile.TemporaryDirectory() as folder:
        config = _config(args, Path(folder))
        began = time.perf_counter()
        async with Engine(config) as engine:
            capacity = engine.capacity
            report.conditions |= {
                "model": args.model if on_gpu else "small",
                "start_s": round(time.perf_counter() - began, 1),
                "kv_nbytes": capacity.num_blocks * capacity.block_nbytes,
                "ranks": args.ranks,
            }
            print(f"  started after {report.conditions['start_s']} s", file=sys.stderr, flush=True)
            wanted = await _play(engine)
            rounds = _Round(engine, memory, wanted)
            for _ in range(args.rounds):
                await rounds.play()
    judged = on_gpu and args.model == DEFAULT_MODEL and args.ranks == 1
    fine = True
    for name, values in rounds.values.items():
        aim = _AIMS.get(name) if judged else None
        figure = report.add(name, values, aim=aim)
        fine = fine and (aim is None or figure <= aim) and (not name.startswith("same") or min(values) == 1.0)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sleep")
    parser.add_argument("--json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kv-gib", type=float, default=40.0)
    args = parser.parse_args()
    report = Report("Sleep and wake")
    report.conditions["device"] = args.device
    fine = uvloop.run(_measure(args, report))
    report.finish(args.json)
    sys.exit(0 if fine else 1)
