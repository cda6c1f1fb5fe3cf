"""One layer's experts on a GPU: our chain of kernels against the library's, and both against the floor.

    python -m benchmarks.gpu_experts [--json FILE] [--shapes A,B] [--tokens N,N] [--routing uniform,skewed] [--skew 1.0]
                                     [--chains ours,library] [--replays 9] [--tiny]

Shapes: qwen3-30b-a3b (128 experts, 8 of a token, width 2,048, inner 768), glm-4.5-air (128, 8, 4,096, 1,408),
deepseek-v2-lite (64, 6, 2,048, 1,408); mixtral-8x7b (8, 2, 4,096, 14,336) where it is named. The modules are the
library's own, in bfloat16, drawn on the device, four layers of each. "ours" is `fdasync_kernels.experts.chain`,
"library" `grouped_mm_experts_forward` of transformers on the same module; both begin with hidden states, ids and
weights and end with the sum. 1 to 8,192 tokens; ids drawn from normal logits, and skewed: with a bias by expert, as
wide as `--skew` times their spread.

Each chain is captured in a CUDA graph of several calls that take the layers in turns, each call with ids of its own, so
many that a round reads 1 GB or more before it comes to the same weights: L2 flatters none. Median of `--replays`
replays, over calls. Before it is timed, our result is held against the library's; one that is off by more than 5 % of
the largest value fails the shape. Figures: `experts_us_SHAPE_ROUTING_TOKENS`, `experts_library_us_...`,
`experts_floor_us_...` (distinct experts' bytes at the rate of a large copy on the same device, or all products at 790
TFLOP/s, the longer), `experts_floor_share_...` (floor over ours), `experts_library_over_ours_...`. Rows with experts
chosen and TFLOP/s stand in the conditions (`tables`). `--tiny` rehearses it in Triton's interpreter. Exit status 1
where a shape failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks._gpu_experts import EXPERTS, Experts, draw_routing, small
from benchmarks._gpu_parts import Parts, describe_device
from benchmarks._report import Report, short

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Chain = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_TOKENS = tuple(2**power for power in range(14))
_DEFAULT = ("qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2-lite")
_ROUTINGS = ("uniform", "skewed")
_LAYERS = 4
# of the largest value of the library's result; roundings of bfloat16 are an order below
_MOST_OFF = 0.05
_COPY_NBYTES = 8 << 30


def chain_of(name: str) -> Chain:
    """The chain: module, hidden states [T, H], ids [T, k], weights [T, k] -> [T, H]."""
    if name == "library":
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward  # type: ignore[no-any-return]
    from fdasync_kernels.experts.chain import experts

    def ours(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = experts(hidden, ids, weights, module.gate_up_proj, module.down_proj)
        return result

    return ours


class Layers:
    """Modules of one shape's experts, with weights, and what they are called with."""

    def __init__(self, experts: Experts, device: torch.device, *, tiny: bool) -> None:
        import torch
        from fdasync_transformers.model.moe_layers import find_experts
        from fdasync_transformers.weights import loading

        self.experts = experts
        self.device = device
        self.dtype = torch.float32 if tiny else torch.bfloat16
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(experts.config(small=False)))
            model = loading.build(loading.read_checkpoint(folder, with_tensors=False), "bfloat16")
        [empty, *_] = find_experts(model).values()
        random = torch.Generator(device).manual_seed(0)
        self.modules = [copy.deepcopy(empty.module).to(self.dtype).to_empty(device=device) for _ in range(_LAYERS)]
        for module in self.modules:
            module.requires_grad_(False)
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.02, generator=random)

    def inputs(self, tokens: int, bias: np.ndarray[Any, Any] | None) -> tuple[list[tuple[Any, ...]], float]:
        """Arguments of each call of a round, and distinct experts of a call, mean."""
        import torch

        one, random = self.experts, np.random.default_rng(tokens)
        chosen: list[int] = []

        def draw(number: int) -> tuple[Any, ...]:
            ids, weights = draw_routing(random, tokens, one.num_experts, one.top_k, bias)
            chosen.append(len(np.unique(ids)))
            generator = torch.Generator(self.device).manual_seed(number)
            hidden = torch.randn((tokens, one.hidden), generator=generator, device=self.device).to(self.dtype)
            dtype = torch.float32 if one.wide_weights else self.dtype
            return (
                self.modules[number % _LAYERS],
                hidden,
                torch.from_numpy(ids).to(self.device),
                torch.from_numpy(weights).to(self.device, dtype),
            )

        calls = [draw(number) for number in range(_LAYERS)]
        count = one.calls(sum(chosen) / _LAYERS, _LAYERS) if self.device.type == "cuda" else _LAYERS
        calls += [draw(number) for number in range(_LAYERS, count)]
        return calls, sum(chosen) / len(chosen)


def seconds_of(chain: Chain, calls: list[tuple[Any, ...]], replays: int) -> list[float]:
    """Seconds of a call, of each replay."""
    from benchmarks._gpu_graph import seconds_in_graph

    return seconds_in_graph([partial(chain, *call) for call in calls], calls[0][1].device, replays)


class Benchmark:
    """One run.

    Attributes:
        rate: bytes a second of a large copy.
    """

    def __init__(self, report: Report, args: argparse.Namespace, device: torch.device) -> None:
        from benchmarks._gpu_decode import copy_bytes_per_s

        self._report = report
        self._args = args
        self._device = device
        self._chains = {name: chain_of(name) for name in args.chains}
        self.rate = copy_bytes_per_s(device, 1 << 20 if args.tiny else _COPY_NBYTES)
        report.add("copy_gbps", [self.rate / 1e9])
        report.conditions["tables"] = {}

    async def shape(self, name: str) -> None:
        """All rows of one shape. Raises AssertionError where our result is not the library's."""
        import torch

        args = self._args
        experts = small(EXPERTS[name]) if args.tiny else EXPERTS[name]
        with torch.inference_mode():
            layers = Layers(experts, self._device, tiny=args.tiny)
            drawn = np.random.default_rng(7).standard_normal(experts.num_experts, np.float32)
            for routing in args.routing:
                bias = args.skew * drawn if routing == "skewed" else None
                rows = [self._row(name, routing, layers, tokens, bias) for tokens in args.tokens]
                self._report.conditions["tables"][f"{name} {routing}"] = rows
                show(f"{name}, {routing} routing", rows)
        del layers
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _row(
        self, name: str, routing: str, layers: Layers, tokens: int, bias: np.ndarray[Any, Any] | None
    ) -> dict[str, float]:
        import torch

        calls, chosen = layers.inputs(tokens, bias)
        floor_s = layers.experts.floor_s(tokens, chosen, self.rate)
        row = {"tokens": tokens, "experts": round(chosen, 1), "floor_us": short(floor_s * 1e6)}
        if len(self._chains) == 2:
            mine, theirs = (self._chains[one](*calls[0]).float() for one in ("ours", "library"))
            off = float((mine - theirs).abs().max() / theirs.abs().max())
            row["off"] = short(off)
            if not off <= _MOST_OFF:
                raise AssertionError(
                    f"{name}, {tokens} tokens: ours is {off:.3g} of the largest value off the library's"
                )
        for chain in self._chains:
            took = seconds_of(self._chains[chain], calls, self._args.replays)
            row[f"{chain}_us"] = short(statistics.median(took) * 1e6)
            row[f"{chain}_us_least"], row[f"{chain}_us_most"] = (short(end(took) * 1e6) for end in (min, max))
        key = f"{name.replace('.', '_').replace('-', '_')}_{routing}_{tokens}"
        figures = self._report.figures
        figures[f"experts_floor_us_{key}"] = row["floor_us"]
        if "library_us" in row:
            figures[f"experts_library_us_{key}"] = row["library_us"]
        if "ours_us" in row:
            figures[f"experts_us_{key}"] = row["ours_us"]
            figures[f"experts_floor_share_{key}"] = short(row["floor_us"] / row["ours_us"])
            products = tokens * layers.experts.top_k * layers.experts.expert_nbytes
            row["tflops"] = short(products / row["ours_us"] / 1e6)
        if {"ours_us", "library_us"} <= row.keys():
            figures[f"experts_library_over_ours_{key}"] = short(row["library_us"] / row["ours_us"])
        del calls
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return row


def show(title: str, rows: list[dict[str, float]]) -> None:
    """A table of one shape and routing."""
    table = Table(title=title)
    for column in ("tokens", "experts", "floor us", "library us", "ours us", "floor/ours", "library/ours", "TFLOP/s"):
        table.add_column(column, justify="right")
    for row in rows:
        floor, library, ours = (row.get(name) for name in ("floor_us", "library_us", "ours_us"))
        values = (
            floor,
            library,
            ours,
            floor / ours if floor and ours else None,
            library / ours if library and ours else None,
            row.get("tflops"),
        )
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        table.add_row(str(int(row["tokens"])), f"{row['experts']:g}", *cells)
    Console(width=100).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every shape")
    parser.add_argument("--shapes", type=names, default=[*_DEFAULT], help=f"of {', '.join(EXPERTS)}")
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in names(text)], help="(default 1 to 8192)")
    parser.add_argument("--routing", type=names, default=[*_ROUTINGS], help="of uniform, skewed (default: both)")
    parser.add_argument("--skew", type=float, default=1.0, help="width of the bias over the spread of the logits (1)")
    parser.add_argument("--chains", type=names, default=["ours", "library"], help="of ours, library (default: both)")
    parser.add_argument("--replays", type=int, default=9, help="of each graph (default 9)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    for option, known in (("shapes", EXPERTS), ("routing", _ROUTINGS), ("chains", ("ours", "library"))):
        wrong = [name for name in getattr(args, option) if name not in known]
        if wrong or not getattr(args, option):
            parser.error(f"--{option} names {wrong or 'nothing'}: there are {', '.join(known)}")
    args.tokens = args.tokens or ([1, 3] if args.tiny else [*_TOKENS])
    if min(args.tokens) < 1 or args.replays < 1:
        parser.error("--tokens and --replays are 1 or more")
    return args


async def run(args: argparse.Namespace, report: Report) -> int:
    import torch

    device = torch.device("cpu" if args.tiny else "cuda")
    parts = Parts(report, args.json)
    benchmark = Benchmark(report, args, device)
    for name in args.shapes:
        await parts.run(name, partial(benchmark.shape, name))
    parts.save()
    for name, problem in parts.failed.items():
        print(f"FAILED {name}: {problem}", file=sys.stderr)
    return 1 if parts.failed else 0


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report("Experts on a GPU")
    describe_device(report, "cpu" if args.tiny else "cuda")
    report.conditions |= {
        "shapes": args.shapes,
        "tokens": args.tokens,
        "skew": args.skew,
        "layers": _LAYERS,
        "replays": args.replays,
    }
    if args.tiny:
        report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    raise SystemExit(uvloop.run(run(args, report)))


if __name__ == "__main__":
    main()
