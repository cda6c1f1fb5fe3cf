"""Times tiles of the fused experts on a GPU, to make the table of `fdasync_kernels/experts/tiles.py`.

    python -m benchmarks.experts_tiles [--shape qwen3-30b-a3b] [--tokens 1,64,256] [--stored fp8|mxfp4] [--table]
                                      [--json FILE]

For each number of tokens every candidate of both products runs in a CUDA graph that rotates over eight layers' weights,
so that no cache flatters it; medians. Every candidate must give the very bits of the first one: a difference is an
error. With `--stored` weights stay in that form, the bits are those of the plain weights that they say, and `plain_us`
is the time of the table's tiles for these. Candidates are compiled by several processes first. `--table` tries none: it
times the tables' tiles alone, over four layers, in half a minute. Needs a CUDA GPU with 40 GiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.experts.stored import StoredWeights
from fdasync_kernels.experts.tiles import Tile, Tiles

from benchmarks._gpu_decode import copy_bytes_per_s
from benchmarks._gpu_experts import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable

# of `--table` as many as no cache holds the experts of, of one token
_LAYERS, _FEW_LAYERS = 8, 4
_DTYPE = torch.bfloat16
# multiplications and additions of bfloat16 of an H200
_PRODUCTS_PER_S = 790e12
# for all candidates of all sizes, some hundred kernels
_COMPILE_S = 900.0
_Cut = tuple[int, int, int, int]

_FEW: tuple[_Cut, ...] = (
    (16, 128, 4, 4),
    (16, 256, 4, 3),
    (32, 128, 4, 4),
    (32, 128, 2, 4),
    (64, 128, 4, 3),
    (16, 128, 2, 5),
)
_DECODE: tuple[_Cut, ...] = (
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 64, 4, 4),
    (64, 64, 4, 6),
    (128, 64, 4, 4),
    (128, 64, 8, 3),
)
_MIDDLE: tuple[_Cut, ...] = ((64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3))
_MANY: tuple[_Cut, ...] = ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 64, 8, 4), (256, 64, 8, 3))
_MOST: tuple[_Cut, ...] = ((64, 64, 4, 3), (64, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (256, 64, 8, 4))


_STORED_UP: tuple[_Cut, ...] = (
    (32, 128, 4, 3), (32, 128, 4, 4), (32, 64, 4, 4), (32, 64, 4, 6), (64, 128, 8, 3), (64, 128, 4, 3), (64, 64, 8, 4),
)  # fmt: skip
_STORED_DOWN: tuple[_Cut, ...] = (
    (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (128, 128, 4, 3), (128, 128, 8, 3), (128, 64, 4, 4),
)  # fmt: skip
# of FP8 by the bulk copy engine
_BULK_UP: tuple[_Cut, ...] = ((64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (64, 64, 4, 4), (64, 64, 8, 4))
_BULK_DOWN: tuple[_Cut, ...] = ((128, 128, 4, 3), (128, 128, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4), (256, 64, 8, 3))


def shape_of(name: str) -> tuple[int, int, int, int]:
    """Experts, those of a token, hidden width, inner width."""
    found = EXPERTS[name]
    return found.num_experts, found.top_k, found.hidden, found.inner


def candidates(tokens: int, top_k: int, num_experts: int) -> list[tuple[int, bool, Tile]]:
    """(rows, single, tile) to be tried for a number of tokens."""
    each = tokens * top_k / num_experts
    found: list[tuple[int, bool, Tile]] = []
    if tokens * top_k <= 64:
        found += [(16, True, Tile(*cut)) for cut in _FEW]
        found += [
            (16, True, Tile(*cut, swap=True, tma=tma))
            for cut in ((64, 128, 4, 4), (64, 64, 4, 6))
            for tma in (False, True)
        ]
        found += [(16, True, Tile(*cut, tma=True)) for cut in ((16, 128, 4, 4), (32, 128, 4, 4))]
        found += [
            (rows, True, Tile(*cut, swap=True, paired=True))
            for rows in (8, 16)
            for cut in ((32, 128, 4, 4), (32, 128, 4, 3), (32, 64, 4, 8))
        ]
        found += [(8, True, Tile(64, 128, 4, 4, swap=True))]
    if tokens * top_k > 32:
        if each <= 24:
            rows = (16,) if each <= 8 else (16, 32)
            for row, cut, tma in itertools.product(rows, _DECODE, (False, True)):
                found.append((row, False, Tile(*cut, swap=True, tma=tma)))
            found += [(rows[-1], False, Tile(*cut)) for cut in _DECODE[:3]]
        elif each <= 96:
            for row, cut, tma in itertools.product((32, 64), _MIDDLE, (False, True)):
                found.append((row, False, Tile(*cut, swap=row == 32, tma=tma)))
            found += [(64, False, Tile(*cut, swap=True, tma=True)) for cut in _MIDDLE[:3]]
        else:
            for row, cut in itertools.product((64, 128), _MANY):
                found.append((row, False, Tile(*cut, tma=True)))
            found += [(row, False, Tile(*cut, tma=True, many=True)) for row in (64, 128) for cut in _MOST]
            found += [(128, False, Tile(*cut)) for cut in _MANY[:1]]
    return found


def stored_candidates(form: str, tokens: int, top_k: int, num_experts: int) -> list[tuple[int, bool, Tile]]:
    """As `candidates`, of weights that stay in a form; paired ones are of the first product."""
    each = tokens * top_k / num_experts
    tiles = [Tile(*cut, swap=True, paired=True) for cut in _STORED_UP]
    tiles += [Tile(*cut, swap=True) for cut in _STORED_DOWN]
    if form == "fp8":
        ups = itertools.product(_BULK_UP, (False, True))
        tiles += [Tile(*cut, swap=True, tma=True, paired=True, ready=ready) for cut, ready in ups]
        tiles += [Tile(*cut, swap=True, tma=True) for cut in _BULK_DOWN]
    rows = [(16, True)] if tokens * top_k <= 64 else []
    if tokens * top_k > 32:
        found = (16,) if each <= 8 else (16, 32) if each <= 24 else (32, 64) if each <= 56 else (64, 128)
        rows += [(row, False) for row in found]
    return [(row, single, tile) for row, single in rows for tile in tiles]


class Layers:
    """Weights of some layers, and rows that are routed uniformly. `form`: in which weights stay; None: plain."""

    def __init__(self, shape: str, tokens: int, layers: int = _LAYERS, form: str | None = None) -> None:
        self.shape = shape_of(shape)
        num_experts, _, width, inner = self.shape
        make = torch.Generator("cuda").manual_seed(1)
        self.up: list[Any] = []
        self.down: list[Any] = []
        self.plain_up: list[Any] = []
        self.plain_down: list[Any] = []
        for _ in range(layers):
            for held, plain, size in (
                (self.up, self.plain_up, (num_experts, 2 * inner, width)),
                (self.down, self.plain_down, (num_experts, width, inner)),
            ):
                kept = _draw(size, make) if form is None else _draw_stored(form, size, make)
                held.append(kept)
                plain.append(kept if form is None else torch.stack([kept.dequantised(e) for e in range(num_experts)]))
        self.route(tokens)

    def route(self, tokens: int) -> None:
        num_experts, top_k, width, _ = self.shape
        make = torch.Generator("cuda").manual_seed(tokens)
        self.x = torch.randn((tokens, width), generator=make, device="cuda").to(_DTYPE)
        logits = [torch.randn((tokens, num_experts), generator=make, device="cuda") for _ in self.up]
        best = [table.topk(top_k) for table in logits]
        self.ids = [found.indices.contiguous() for found in best]
        self.weights = [torch.softmax(found.values, -1).to(_DTYPE) for found in best]
        self.distinct = statistics.fmean(len(ids.unique()) for ids in self.ids)

    def run(self, layer: int, tiles: Tiles | None) -> torch.Tensor:
        return experts(self.x, self.ids[layer], self.weights[layer], self.up[layer], self.down[layer], tiles=tiles)

    def run_plain(self, layer: int) -> torch.Tensor:
        """By the table's tiles."""
        return experts(self.x, self.ids[layer], self.weights[layer], self.plain_up[layer], self.plain_down[layer])


def _draw(shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=make, device="cuda", dtype=torch.float32).mul_(0.02).to(_DTYPE)


def _draw_stored(form: str, shape: tuple[int, int, int], make: torch.Generator) -> StoredWeights:
    """Random values whose bytes are any but NaN, of about the size of a model's weights."""
    num_experts, rows, inner = shape
    if form == "fp8":
        values = (
            torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16).mul_(64).to(torch.float8_e4m3fn)
        )
        scales = torch.rand((num_experts, -(-rows // 128), -(-inner // 128)), generator=make, device="cuda")
        return StoredWeights("fp8", values, scales * 2e-4 + 2e-4)
    packed = torch.randint(0, 256, (num_experts, rows, inner // 2), generator=make, device="cuda", dtype=torch.uint8)
    powers = torch.randint(119, 123, (num_experts, rows, inner // 32), generator=make, device="cuda", dtype=torch.uint8)
    return StoredWeights("mxfp4", packed, powers)


def graph_us(run: Callable[[int], Any], layers: int, repeat: int = 7) -> float:
    """Median microseconds of one call in a graph of two rounds over all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(2 * layers):
                run(number % layers)
        took = []
        graph.replay()
        for _ in range(repeat):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            took.append(began.elapsed_time(ended) * 1e3 / (2 * layers))
    return statistics.median(took)


def _fixed(form: str | None) -> tuple[Tile, Tile]:
    """What stands beside a candidate for the other product."""
    if form is None:
        return Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)
    return Tile(32, 64, 4, 4, swap=True, paired=True), Tile(64, 64, 4, 4, swap=True)


def _pairs(tile: Tile, fixed: tuple[Tile, Tile], form: str | None) -> list[tuple[Tile, Tile]]:
    """With a candidate for either product; stored weights' have one of them."""
    pairs = [(tile, fixed[1]), (fixed[0], tile)]
    return pairs if form is None else [pairs[0 if tile.paired else 1]]


def _tiles(rows: int, single: bool, up: Tile, down: Tile, tokens: int) -> Tiles:
    chunk = 512 if tokens <= 64 else 1024 if tokens <= 256 else 4096
    return Tiles(rows, up, down, single=single, chunk=chunk, apart=tokens > 512)


def _compile(shape: str, jobs: list[tuple[int, int, bool, Tile]], form: str | None) -> None:
    """Compile candidates: a process of several; the kernels come back by the cache on disk."""
    layers: Layers | None = None
    for tokens, rows, single, tile in jobs:
        if layers is None:
            layers = Layers(shape, tokens, 1, form)
        elif len(layers.x) != tokens:
            layers.route(tokens)
        try:
            fixed = _fixed(form)
            for pair in _pairs(tile, fixed, form):
                layers.run(0, _tiles(rows, single, *pair, tokens))
        except Exception as error:  # too large for the device: it is not timed either
            print(f"  {tokens} {tile}: {type(error).__name__} {str(error)[:80]}", flush=True)
    torch.cuda.synchronize()


def tune(layers: Layers, tokens: int, form: str | None = None) -> dict[str, Any]:
    """Times all candidates of each product in a chain whose other product is fixed, then the best two together."""
    layers.route(tokens)
    num_experts, top_k, _, _ = layers.shape
    wanted = layers.run_plain(0)
    fixed = _fixed(form)
    # by (rows, single): microseconds and tile of either product
    took: dict[tuple[int, bool], tuple[list[tuple[float, Tile]], list[tuple[float, Tile]]]] = {}
    listed = partial(stored_candidates, form) if form else candidates
    for rows, single, tile in listed(tokens, top_k, num_experts):
        sides = took.setdefault((rows, single), ([], []))
        for pair in _pairs(tile, fixed, form):
            side = 0 if pair[0] is tile else 1
            tiles = _tiles(rows, single, *pair, tokens)
            try:
                same = torch.equal(layers.run(0, tiles), wanted)
                us = graph_us(partial(layers.run, tiles=tiles), len(layers.up), 3)
            except triton.runtime.errors.OutOfResources:
                continue
            if not same:
                raise SystemExit(f"{tiles} gives other bits at {tokens} tokens")
            sides[side].append((us, tile))
    best: list[tuple[float, Tiles]] = []
    tops = {}
    for (rows, single), sides in took.items():
        for side, found in zip(("up", "down"), sides, strict=True):
            found.sort(key=lambda one: one[0])
            tops[f"{rows}{' single' if single else ''} {side}"] = [(round(us, 1), repr(tile)) for us, tile in found[:5]]
        tiles = _tiles(rows, single, sides[0][0][1], sides[1][0][1], tokens)
        best.append((graph_us(partial(layers.run, tiles=tiles), len(layers.up)), tiles))
    best_us, tiles = min(best, key=lambda one: one[0])
    return {**table(layers, tokens), "best_us": best_us, "tiles": repr(tiles), "tops": tops}


def table(layers: Layers, tokens: int) -> dict[str, Any]:
    """Times the tables' tiles, of these weights and of plain ones."""
    layers.route(tokens)
    if not torch.equal(layers.run(0, None), layers.run_plain(0)):
        raise SystemExit(f"the table's tiles give other bits at {tokens} tokens")
    table_us = graph_us(partial(layers.run, tiles=None), len(layers.up))
    return {"tokens": tokens, "plain_us": graph_us(layers.run_plain, len(layers.up)), "table_us": table_us}


def compile_all(shape: str, jobs: list[tuple[int, int, bool, Tile]], form: str | None = None) -> None:
    """Compile candidates in several processes. Raises SystemExit if one is not done in time."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_compile, args=(shape, jobs[i::workers], form)) for i in range(workers)]
    for child in children:
        child.start()
    until = time.monotonic() + _COMPILE_S
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    late = [child for child in children if child.is_alive()]
    for child in late:
        child.kill()
        child.join(10.0)
    if late:
        raise SystemExit(f"{len(late)} processes did not compile their candidates within {_COMPILE_S:g} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(EXPERTS), default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,4,8,32,64,128,256,512,1024,2048,8192")
    parser.add_argument("--table", action="store_true", help="time the tables' tiles alone")
    parser.add_argument("--stored", choices=("fp8", "mxfp4"), help="weights stay in this form")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("experts_tiles needs a CUDA GPU, and torch sees none")
    counts = [int(count) for count in args.tokens.split(",")]
    num_experts, top_k, width, inner = shape_of(args.shape)
    if not args.table:
        listed = partial(stored_candidates, args.stored) if args.stored else candidates
        jobs = [(tokens, *each) for tokens in counts for each in listed(tokens, top_k, num_experts)]
        compile_all(args.shape, jobs, args.stored)
    rate = copy_bytes_per_s(torch.device("cuda"), 4 << 30)
    print(f"{args.shape}: copy {rate / 1e9:.0f} GB/s", flush=True)
    layers = Layers(args.shape, counts[0], _FEW_LAYERS if args.table else _LAYERS, args.stored)
    nbytes_each = sum(weights[0].nbytes for weights in (layers.up, layers.down)) / num_experts
    results = []
    for tokens in counts:
        found = table(layers, tokens) if args.table else tune(layers, tokens, args.stored)
        nbytes = layers.distinct * nbytes_each
        floor_us = max(nbytes / rate, tokens * top_k * 6 * width * inner / _PRODUCTS_PER_S) * 1e6
        results.append({**found, "distinct": layers.distinct, "floor_us": floor_us})
        print(f"{tokens} tokens, {layers.distinct:.1f} experts: floor {floor_us:.1f} us, table {found['table_us']:.1f}")
        print(f"  ({floor_us / found['table_us']:.2f}), plain {found['plain_us']:.1f}", flush=True)
        if args.table:
            continue
        print(f"  best {found['best_us']:.1f} ({floor_us / found['best_us']:.2f}): {found['tiles']}")
        for name, tops in found["tops"].items():
            print(f"  {name}: {tops}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
