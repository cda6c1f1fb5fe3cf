"""Experts on a device, their tiles, and what they should give in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.experts.tiles import Tile, Tiles

# relative size of the error
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# experts, slots of a token, width of rows, width between the products
E, K, H, INNER = 6, 3, 64, 48
SINGLE = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), single=True)
PAIRED = Tiles(8, Tile(16, 32, 4, 2, swap=True, paired=True), Tile(32, 32, 4, 2, swap=True), single=True)
SMALL = Tiles(16, Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), chunk=32)
SWAPPED = Tiles(16, Tile(32, 32, 4, 2, swap=True), Tile(32, 32, 4, 2, swap=True), chunk=64)
APART = Tiles(16, Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), apart=True)
MANY = Tiles(32, Tile(32, 32, 4, 2, tma=True, many=True), Tile(32, 16, 4, 2, tma=True, many=True), apart=True)
BULK = Tiles(16, Tile(32, 32, 4, 2, tma=True), Tile(64, 16, 4, 2, swap=True, tma=True), chunk=32)


@dataclass
class Case:
    """Arguments of `experts`, on a device."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    options: dict[str, Any]

    def run(self, **more: Any) -> torch.Tensor:
        return experts(self.hidden, self.ids, self.weights, self.up, self.down, **{**self.options, **more})


def make(device: torch.device, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Case:
    """Random rows with every kind of id that means nothing; a NaN stands where nothing may be read."""
    draw = torch.Generator().manual_seed(seed)
    gated = options.get("gated", True)
    rows = 2 * INNER if gated else INNER

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(device, dtype)

    up, down = random(E, rows, H, scale=0.3), random(E, H, INNER, scale=0.3)
    if options.get("transposed"):
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    if options.pop("biased", False):
        options |= {"up_bias": random(E, rows), "down_bias": random(E, H)}
    ids = torch.stack([torch.randperm(E + 2, generator=draw)[:K] - 1 for _ in range(tokens)]).to(device)
    # rows stand apart, as rows of a wider tensor do
    hidden = torch.full((tokens, H + 16), float("nan"), dtype=dtype, device=device)
    hidden[:, :H] = random(tokens, H)
    weights = torch.rand((tokens, K), generator=draw).to(device, dtype)
    if options.pop("padded", False):
        live = torch.randint(-1, 3, (tokens,), generator=draw)
        live[0] = 0
        options["live"] = live.to(device)
        hidden[live.to(device) < 0] = float("nan")
    return Case(hidden[:, :H], ids, weights, up, down, options)


def reference(case: Case) -> torch.Tensor:
    """[T, K, H] in float64: what each slot adds."""
    options = case.options
    gated, live = options.get("gated", True), options.get("live")
    parts = torch.zeros((*case.ids.shape, H), dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(case.ids)), torch.arange(K)).tolist():
        expert = int(case.ids[token, slot])
        if not 0 <= expert < E or (live is not None and int(live[token]) < 0):
            continue
        up, down = case.up[expert].double().cpu(), case.down[expert].double().cpu()
        if options.get("transposed"):
            up, down = up.T, down.T
        first = up @ case.hidden[token].double().cpu()
        if "up_bias" in options:
            first = first + options["up_bias"][expert].double().cpu()
        if gated:
            gate, value = (first[::2], first[1::2]) if options.get("interleaved") else first.chunk(2)
            inner = torch.nn.functional.silu(gate) * value
        else:
            inner = torch.nn.functional.silu(first)
        second = down @ inner
        if "down_bias" in options:
            second = second + options["down_bias"][expert].double().cpu()
        parts[token, slot] = second * case.weights[token, slot].double().cpu()
    return parts
