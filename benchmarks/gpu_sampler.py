"""The sampler's kernels on a GPU, by kind of request and by kernel, against one reading of the logits.

    python -m benchmarks.gpu_sampler [--json FILE] [--rows 1,64,256] [--kinds temperature,top_p,top_k,min_p]
                                     [--logits flat,peaked] [--replays 9] [--tiny]

Logits of 151,936 ids in bfloat16, drawn from a normal distribution with a spread of 1 (flat: a top-p of 0.95 keeps
112,000 ids) or 6 (peaked: 30). Every row asks for its raw log-prob at temperature 1, and for nothing else
(temperature), a top-p of 0.95, a top-k of 50 or a min-p of 0.05. A step's sampling is captured in a CUDA graph that
takes tables of logits in turns, so many that L2 holds none until it is read again. Median of `--replays` replays, over
calls: `sampler_us_KIND_LOGITS_ROWS`; `sampler_floor_us_ROWS` is one reading of the table at the rate of a large copy
on the same device. Microseconds by kernel, from torch's profiler, stand in the conditions (`kernels`).

Before a kind is timed, eight of its rows are held against the sampler of the host: another token fails the kind.
`--tiny` rehearses it in Triton's interpreter. Exit status 1 where a kind failed.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import uvloop
from fdasync_transformers.sampling.plan import plan_samples
from fdasync_transformers.sampling.sampler import compute_samples, sample_on_device
from rich.console import Console
from rich.table import Table

from benchmarks._gpu_decode import copy_bytes_per_s
from benchmarks._gpu_graph import seconds_in_graph
from benchmarks._gpu_parts import Parts, describe_device
from benchmarks._report import Report, short
from fdasync.request import SamplerSpec

_KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
}
_SPREADS = {"flat": 1.0, "peaked": 6.0}
_VOCAB, _TINY_VOCAB = 151_936, 700
# tables of logits that are taken in turns hold so much, and more than L2
_TABLES_NBYTES, _MOST_TABLES = 256 << 20, 200
_COPY_NBYTES = 8 << 30
_CHECKED, _PROFILED = 8, 9
_POSITION = 5


def specs_of(kind: str, rows: int) -> list[SamplerSpec]:
    """What each row asks for."""
    nothing: dict[str, Any] = {
        "prompt_len": 3, "index": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "stop_ids": (),
        "raw": True, "processed": False, "top": 0,
    }  # fmt: skip
    return [SamplerSpec(seed=row, **(nothing | _KINDS[kind])) for row in range(rows)]


class Step:
    """A step's sampling of one kind: tables of logits, and the numbers that go with any of them."""

    def __init__(self, kind: str, spread: float, rows: int, vocab: int, device: torch.device) -> None:
        self.plan = plan_samples(specs_of(kind, rows), [_POSITION] * rows, range(rows))
        self.sent = {name: torch.from_numpy(array).to(device) for name, array in self.plan.arrays.items()}
        count = 1 if device.type == "cpu" else min(_MOST_TABLES, 1 + _TABLES_NBYTES // (rows * vocab * 2))
        random = torch.Generator(device).manual_seed(rows)
        self.tables = [
            (torch.randn((rows, vocab), generator=random, device=device) * spread).bfloat16() for _ in range(count)
        ]

    def sample(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        return sample_on_device(table, self.plan, self.sent, None)

    def check(self, kind: str) -> None:
        """Raises AssertionError where the host draws another token from one of the first rows."""
        mine = self.sample(self.tables[0])["tokens"][:_CHECKED].tolist()
        rows = len(mine)
        plan = plan_samples(specs_of(kind, rows), [_POSITION] * rows, range(rows))
        sent = {name: values[:rows].cpu() for name, values in self.sent.items()}
        host = compute_samples(self.tables[0][:rows].cpu(), plan, sent, None)["tokens"].tolist()
        if mine != host:
            raise AssertionError(f"{kind}: tokens {mine}, where the host draws {host}")


def seconds_of(step: Step, replays: int) -> list[float]:
    """Seconds of a step's sampling, of each replay."""
    return seconds_in_graph([partial(step.sample, table) for table in step.tables], step.tables[0].device, replays)


def kernels_of(step: Step) -> dict[str, float]:
    """Microseconds of a step's sampling by kernel, the longest first; empty where there is no GPU."""
    if not step.tables[0].is_cuda:
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(_PROFILED):
            step.sample(step.tables[number % len(step.tables)])
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        # operations of torch have names of hundreds of letters
        name = event.key if event.key.endswith("_kernel") else "others"
        found[name] += event.self_device_time_total / _PROFILED
    return {name: short(us) for name, us in sorted(found.items(), key=lambda one: -one[1])}


class Benchmark:
    """One run."""

    def __init__(self, report: Report, args: argparse.Namespace, device: torch.device) -> None:
        self._report = report
        self._args = args
        self._device = device
        self._vocab = _TINY_VOCAB if args.tiny else _VOCAB
        rate = copy_bytes_per_s(device, 1 << 20 if args.tiny else _COPY_NBYTES)
        report.add("copy_gbps", [rate / 1e9])
        for rows in args.rows:
            report.figures[f"sampler_floor_us_{rows}"] = short(rows * self._vocab * 2 / rate * 1e6)
        report.conditions["kernels"] = {}

    async def kind(self, kind: str) -> None:
        """All rows and logits of one kind. Raises AssertionError where a token is not the host's."""
        table = Table(title=kind)
        for column in ("rows", "logits", "us", "by kernel"):
            table.add_column(column, justify="left" if column == "by kernel" else "right")
        for rows in self._args.rows:
            for logits in self._args.logits:
                step = Step(kind, _SPREADS[logits], rows, self._vocab, self._device)
                step.check(kind)
                took = seconds_of(step, self._args.replays)
                us = self._report.add(f"sampler_us_{kind}_{logits}_{rows}", [one * 1e6 for one in took])
                kernels = kernels_of(step)
                self._report.conditions["kernels"][f"{kind} {logits} {rows}"] = kernels
                cells = ", ".join(f"{name.removesuffix('_kernel')} {spent:.1f}" for name, spent in kernels.items())
                table.add_row(str(rows), logits, f"{us:.1f}", cells)
        Console(width=150).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    def numbers(text: str) -> list[int]:
        return [int(one) for one in names(text)]

    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every kind")
    parser.add_argument("--rows", type=numbers, help="(default 1,64,256; tiny: 1,3)")
    parser.add_argument("--kinds", type=names, default=[*_KINDS], help=f"of {', '.join(_KINDS)} (default: all)")
    parser.add_argument("--logits", type=names, default=[*_SPREADS], help="of flat, peaked (default: both)")
    parser.add_argument("--replays", type=int, default=9, help="of each graph (default 9)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    for option, known in (("kinds", _KINDS), ("logits", _SPREADS)):
        wrong = [name for name in getattr(args, option) if name not in known]
        if wrong or not getattr(args, option):
            parser.error(f"--{option} names {wrong or 'nothing'}: there are {', '.join(known)}")
    args.rows = args.rows or ([1, 3] if args.tiny else [1, 64, 256])
    if min(args.rows) < 1 or args.replays < 1:
        parser.error("--rows and --replays are 1 or more")
    return args


async def run(benchmark: Benchmark, parts: Parts, kinds: list[str]) -> None:
    for kind in kinds:
        await parts.run(kind, partial(benchmark.kind, kind))


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report("The sampler on a GPU")
    describe_device(report, "cpu" if args.tiny else "cuda")
    report.conditions |= {"rows": args.rows, "replays": args.replays}
    if args.tiny:
        report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    benchmark = Benchmark(report, args, torch.device("cpu" if args.tiny else "cuda"))
    parts = Parts(report, args.json)
    uvloop.run(run(benchmark, parts, args.kinds))
    raise SystemExit(parts.finish())


if __name__ == "__main__":
    main()
