"""The HTTP front beside an engine on a GPU: streams through it against readers of a router, rows in every reply.

    python -m benchmarks.gpu_http [--json FILE] [--streams 256] [--pairs 3] [--seconds 15] [--context 1024] [--tiny]

One instance with the shape of Qwen3-30B-A3B in bfloat16 (weights drawn on the device) runs as `fdasync serve` on the
GPU. Both arms ask it for the same: streams that send one request after the other, prompts of `--context` tokens that
the prefix cache has but for their last block, 64 to 192 new tokens, greedy, routing of prompt and output in every
reply. Requests of different lengths end at different times, as in a rollout, and each end carries half a megabyte of
rows. One arm is a router's readers in a process of their own. The other is `fdasync http` in a process of its own, its
rows base64 of `.npy` in the last event, and raw-socket clients in a third, which parse no JSON.

    http_over_direct_N       new tokens per second through the front, over those of the readers; ratios of pairs
    direct_tokens_per_s_N    of the readers
    tokens_per_event_N, gap_p99_ms_N, gap_p99_ms_direct, front_us_per_chunk   as in `benchmarks.http`
    front_share              CPU of the front's process, of one core
    rows_mb_s                rows in replies through the front, MB per second before base64

The arms alternate in order; some 4 minutes in all. Needs a CUDA GPU with 100 GiB for the default;
`--context 256 --streams 128` needs 75 GiB. `--tiny` rehearses on a CPU, where the figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for

from benchmarks import _http_front
from benchmarks._gpu_scale import Scale, tiny, write_folder
from benchmarks._http_front import Meter, front
from benchmarks._http_load import Load
from benchmarks._report import Report, calibrate_us
from fdasync import EngineConfig, RouterConfig, connect

if TYPE_CHECKING:
    from benchmarks._http_front import Front

_LEAST_TOKENS, _MOST_TOKENS = 64, 192
_AIM = 0.98
_START_S = 600.0
# prompts that are not in the cache yet: so many tokens a second, at least
_PREFILL_TOKENS_S = 15_000.0
_WARM_S = 5.0


def load_of(scale: Scale, streams: int, count_s: float) -> Load:
    vocab_size = min(int(scale.config["vocab_size"]), 150_000)
    short = scale.device == "cpu"
    return Load(
        streams=streams,
        prompt_tokens=scale.context,
        vocab_size=vocab_size,
        least_tokens=4 if short else _LEAST_TOKENS,
        most_tokens=12 if short else _MOST_TOKENS,
        rows=True,
        warm_s=1.0 if short else _WARM_S,
        count_s=count_s,
    )


def config_of(scale: Scale, folder: str, load: Load) -> EngineConfig:
    longest = load.prompt_tokens + load.most_tokens + 1
    blocks_each = -(-longest // scale.block_tokens)
    return EngineConfig(
        model=folder,
        runner_config={
            **scale.runner_config((load.streams,)),
            "device": "cpu" if scale.device == "cpu" else "auto",
            "kernels": "torch" if scale.device == "cpu" else "triton",
        },
        process="worker",
        tokenizer="none",
        max_context_tokens=longest,
        block_tokens=scale.block_tokens,
        # an eighth more than all need: cached blocks of prompts stay
        num_blocks=load.streams * blocks_each * 9 // 8,
        # an instance has to have some
        host_blocks=2 * blocks_each,
        max_running=load.streams,
        max_step_tokens=max(scale.max_step_tokens, load.streams * scale.block_tokens),
        max_requests=2 * load.streams,
        pipeline_depth=2,
        start_deadline_s=_START_S,
        seed=1,
    )


class Bench:
    """Both arms over one instance, and their values by name."""

    def __init__(self, load: Load, address: str, served: Front, meter: Meter, row_nbytes: int) -> None:
        self.values: dict[str, list[float]] = {}
        self._load = load
        self._address = address
        self._served = served
        self._meter = meter
        self._row_nbytes = row_nbytes

    async def warm(self) -> None:
        """Have the instance compute every prompt once, and both ways run."""
        tokens = self._load.streams * self._load.prompt_tokens
        first = msgspec.structs.replace(self._load, warm_s=tokens / _PREFILL_TOKENS_S, count_s=3.0)
        await _http_front.direct(self._address, first, self._meter)
        second = msgspec.structs.replace(self._load, count_s=3.0)
        await _http_front.through_front(self._served, second, self._meter)

    async def pair(self, *, turned: bool) -> None:
        """One arm after the other; `turned`: the front's first."""
        load, served = self._load, self._served
        if turned:
            clients, cpu = await _http_front.through_front(served, load, self._meter)
        readers, _ = await _http_front.direct(self._address, load, self._meter)
        if not turned:
            clients, cpu = await _http_front.through_front(served, load, self._meter)
        if not (clients.replies and readers.replies):
            raise RuntimeError("no reply ended while the arms were counted: give more --seconds")
        events_s = clients.events / load.count_s
        mean_tokens = (load.least_tokens + load.most_tokens) / 2
        reply_nbytes = (load.prompt_tokens + mean_tokens - 1) * self._row_nbytes
        size = load.streams
        found = {
            f"direct_tokens_per_s_{size}": readers.tokens / load.count_s,
            f"http_over_direct_{size}": clients.tokens / readers.tokens,
            f"tokens_per_event_{size}": clients.tokens / clients.events,
            f"gap_p99_ms_{size}": clients.gap_p99_s * 1e3,
            "gap_p99_ms_direct": readers.gap_p99_s * 1e3,
            "front_us_per_chunk": cpu.front_s / cpu.wall_s / events_s * 1e6,
            "front_share": cpu.front_s / cpu.wall_s,
            "rows_mb_s": clients.replies / load.count_s * reply_nbytes / 1e6,
        }
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)
            print(f"  {name} {value:.4g}", file=sys.stderr, flush=True)


async def measure(scale: Scale, load: Load, pairs: int, report: Report) -> None:
    """Start everything, and play the pairs."""
    model = scale.config
    row_nbytes = model["num_hidden_layers"] * model["num_experts_per_tok"]
    with tempfile.TemporaryDirectory() as name:
        config = config_of(scale, write_folder(Path(name), scale), load)
        began = time.perf_counter()
        async with (
            LocalFleet(plans_for(config, {"mixed": 1})) as fleet,
            connect(fleet.addresses, RouterConfig(require="all")) as router,
        ):
            report.conditions["engine_start_s"] = round(time.perf_counter() - began, 1)
            (address,) = fleet.addresses
            async with front(address, rows="npy") as served:
                bench = Bench(load, address, served, Meter(router, fleet.children[0].pid), row_nbytes)
                await fleet.while_alive(bench.warm())
                report.conditions["warm_after_s"] = round(time.perf_counter() - began, 1)
                try:
                    for number in range(pairs):
                        await fleet.while_alive(bench.pair(turned=number % 2 == 1))
                finally:
                    # what was found is not lost with the rest
                    for key, values in bench.values.items():
                        report.add(key, values, aim=_AIM if key.startswith("http_over") else None)
            report.conditions["took_s"] = round(time.perf_counter() - began, 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--streams", type=int, default=256, help="requests at a time (default 256)")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each arm (default 3)")
    parser.add_argument("--seconds", type=float, default=15.0, help="that are counted in each (default 15)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens (default 1024)")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    args = parser.parse_args()
    for name in ("streams", "pairs", "seconds", "context"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0")
    return args


def conditions(*, on_gpu: bool) -> dict[str, Any]:
    """What it runs on. Exits where there is no GPU."""
    import torch
    import transformers

    if on_gpu and not torch.cuda.is_available():
        sys.exit("this benchmark measures a CUDA GPU, and torch sees none here; --tiny rehearses it on a CPU")
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "calibration_us": calibrate_us(),
    }


def main() -> None:
    args = parse()
    report = Report("The HTTP front beside a GPU")
    report.conditions |= conditions(on_gpu=not args.tiny)
    scale = tiny() if args.tiny else dataclasses.replace(Scale(), context=args.context)
    streams = min(args.streams, scale.sizes[-1]) if args.tiny else args.streams
    load = load_of(scale, streams, args.seconds)
    report.conditions |= {"load": msgspec.to_builtins(load), "pairs": args.pairs, "dtype": scale.dtype}
    if args.tiny:
        report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    try:
        uvloop.run(measure(scale, load, args.pairs, report))
    finally:
        report.finish(args.json)


if __name__ == "__main__":
    main()
