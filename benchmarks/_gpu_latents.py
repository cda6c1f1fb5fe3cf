"""The part of `gpu_attention` about latent (MLA) layers: their decode against bytes and products.

Latents of DeepSeek's shape (rank 512, rotary part 64, bf16), of 16 heads as in V2-Lite and of 128 as in V3. Pages of
enough layers are cut from the memory of the other parts' pool that no layer finds its latents in the L2 cache.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from fdasync_kernels.attention.decode import decode_workspace
from fdasync_kernels.attention.latent import attend_latents

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._gpu_attention_rig import Rig
    from benchmarks._report import Report

RANK, ROTARY, BLOCK_TOKENS = 512, 64, 16
HEADS = (16, 128)
# in all layers together: many times what an L2 cache holds
LATENTS_NBYTES = 400_000_000


def latent_bytes(sequences: int, length: int) -> int:
    """Of a layer's latents, each read once."""
    return sequences * length * (RANK + ROTARY) * 2


def latent_flops(sequences: int, length: int, heads: int) -> float:
    """Of both products of a layer."""
    return 2.0 * sequences * length * heads * (2 * RANK + ROTARY)


def decode(rig: Rig, sequences: int, length: int, heads: int) -> tuple[Callable[[], object], int]:
    """All layers' decode of `sequences` queries at the end of as many tokens, and how many layers that is."""
    need = -(-length // BLOCK_TOKENS)
    blocks, width = sequences * need, BLOCK_TOKENS * (RANK + ROTARY)
    fit = rig.pool.numel() // (blocks * width)
    layers = max(1, min(fit, 128, LATENTS_NBYTES // latent_bytes(sequences, length)))
    shape, strides = (blocks, BLOCK_TOKENS, 1, RANK + ROTARY), (layers * width, RANK + ROTARY, RANK + ROTARY, 1)
    views = [rig.pool.as_strided(shape, strides, number * width) for number in range(layers)]
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(sequences, need)
    tables = torch.from_numpy(order).to(rig.device)
    lanes = torch.arange(sequences, dtype=torch.int32, device=rig.device)
    positions = torch.full((sequences,), length - 1, device=rig.device)
    query = torch.randn(sequences, heads, RANK, device=rig.device).bfloat16()
    rotary = torch.randn(sequences, heads, ROTARY, device=rig.device).bfloat16()
    out = torch.empty_like(query)
    workspace = decode_workspace(sequences, heads, RANK, rig.device)

    def run() -> None:
        for latents in views:
            attend_latents(
                query, rotary, latents, tables, lanes, positions, scale=192**-0.5, out=out, workspace=workspace
            )

    return rig.graph(run), layers


def limit_tflops(rig: Rig, rounds: int, report: Report) -> float:
    """What torch's own product of large matrices reaches on this device."""
    side = 8192 if rig.device.type == "cuda" else 64
    left, right = (torch.randn(side, side, device=rig.device).bfloat16() for _ in range(2))
    run = partial(torch.mm, left, right)
    run()
    return report.add("limit_product_tflops", [2 * side**3 / rig.ms(run, 3) / 1e9 for _ in range(rounds)])


def measure_latents(rig: Rig, rounds: int, copy_gbps: float, report: Report) -> None:
    """Adds `latent<heads>_*` for every size of the latents; `copy_gbps` is what a copy reads plus writes."""
    most = limit_tflops(rig, rounds, report)
    for heads in HEADS:
        for count, length in rig.sizes.latents:
            run, layers = decode(rig, count, length, heads)
            run()
            us = [rig.ms(run) * 1e3 / layers for _ in range(rounds)]
            nbytes, flops = latent_bytes(count, length), latent_flops(count, length, heads)
            name = f"latent{heads}_{{}}_{count}x{length}"
            took = report.add(name.format("us"), us)
            report.add(name.format("gbps"), [nbytes / one / 1e3 for one in us])
            report.add(name.format("tflops"), [flops / one / 1e6 for one in us])
            floor_us = max(nbytes / copy_gbps / 1e3, flops / most / 1e6)
            report.add(name.format("share"), [floor_us / took])
