"""Paged KV and queries of a layer on a GPU. Used by `gpu_attention` and its parts."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.prefill import attend_prefill, prefill_tiles
from fdasync_kernels.store import store_kv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_kernels.attention.tile import Launch


BLOCK_TOKENS = 16
HEADS, KV_HEADS, DIM = 32, 4, 128
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Sizes:
    """How large everything is; a rehearsal takes less."""

    layers: int = 48
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024), (256, 1024), (1, 8192), (64, 8192))
    prefills: tuple[tuple[int, int, int], ...] = ((1, 0, 8192), (8, 0, 1024), (64, 1024, 128), (256, 1023, 1))
    prefill_layers: int = 4
    stores: tuple[int, ...] = (1, 256, 8192)
    latents: tuple[tuple[int, int], ...] = ((1, 8192), (64, 1024), (128, 1024), (256, 1024), (64, 4096), (256, 4096))
    copy_nbytes: int = 4 << 30


@dataclass
class Rig:
    """The pool, all layers' views of it, and tables that scatter each sequence's blocks over it.

    `beside`: the heads of a token stand side by side, as they did before blocks were made of shares. A copy by
    `dataclasses.replace` has the same pool.
    """

    device: torch.device
    sizes: Sizes
    pool: torch.Tensor | None = None
    beside: bool = False
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        prefills = [(count, cached + length) for count, cached, length in self.sizes.prefills]
        tokens = max(count * length for count, length in (*self.sizes.decodes, *prefills))
        blocks = tokens // BLOCK_TOKENS + 2 * max(count for count, _ in (*self.sizes.decodes, *prefills))
        width = BLOCK_TOKENS * KV_HEADS * DIM
        if self.pool is None:
            self.pool = torch.empty(blocks, 2 * self.sizes.layers * width, dtype=torch.bfloat16, device=self.device)
            self.pool.normal_()
        shape = (blocks, BLOCK_TOKENS, KV_HEADS, DIM)
        apart, page = self.pool.stride(0), BLOCK_TOKENS * DIM
        strides, size = (apart, DIM, apart // KV_HEADS, 1), page
        if self.beside:
            strides, size = (apart, KV_HEADS * DIM, DIM, 1), width
        views = [self.pool.as_strided(shape, strides, number * size) for number in range(2 * self.sizes.layers)]
        self.keys, self.values = views[::2], views[1::2]

    def tables(self, sequences: int, length: int) -> torch.Tensor:
        need = -(-length // BLOCK_TOKENS)
        order = np.random.default_rng(1).permutation(len(self.pool))[: sequences * need]
        return torch.from_numpy(order.astype(np.int32)).view(sequences, need).to(self.device)

    def ms(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Of the device, per repetition; of the host in a rehearsal."""
        if self.device.type == "cpu":
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats

    def graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same work as one graph; it has run once before, so that nothing is compiled within.

        What `run` holds lives as long as what is returned: a graph knows addresses only.
        """
        run()
        if self.device.type == "cpu":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return partial(_replay, graph, run)

    def decode(
        self, sequences: int, length: int, launch: Launch | None = None, splits: int | None = None
    ) -> Callable[[], object]:
        """All layers' decode of `sequences` queries at the end of as many tokens."""
        tables = self.tables(sequences, length)
        lanes = torch.arange(sequences, dtype=torch.int32, device=self.device)
        positions = torch.full((sequences,), length - 1, device=self.device)
        query = torch.randn(sequences, HEADS, DIM, device=self.device).bfloat16()
        out = torch.empty_like(query)
        workspace = decode_workspace(sequences, HEADS, DIM, self.device)

        def run() -> None:
            for keys, values in zip(self.keys, self.values, strict=True):
                attend_decode(
                    query, keys, values, tables, lanes, positions, scale=SCALE, reach_kind="full", reach_size=0,
                    sinks=None, out=out, workspace=workspace, launch=launch, splits=splits,
                )  # fmt: skip

        return self.graph(run)

    def prefill(self, sequences: int, cached: int, length: int, launch: Launch | None = None) -> Callable[[], object]:
        """Some layers' prefill of `length` tokens of `sequences` prompts, each after as many `cached` ones."""
        tables = self.tables(sequences, cached + length)
        lanes = torch.arange(sequences, dtype=torch.int32, device=self.device)
        starts = torch.full((sequences,), cached, device=self.device)
        first_rows = torch.arange(sequences, device=self.device) * length
        counts = torch.full((sequences,), length, device=self.device)
        tiles = torch.from_numpy(prefill_tiles([length] * sequences)).to(self.device)
        query = torch.randn(sequences * length, HEADS, DIM, device=self.device).bfloat16()
        out = torch.empty_like(query)

        def run() -> None:
            for keys, values in zip(self.keys[: self.sizes.prefill_layers], self.values, strict=False):
                attend_prefill(
                    query, keys, values, tables, lanes, starts, first_rows, counts, tiles, scale=SCALE,
                    reach_kind="full", reach_size=0, sinks=None, out=out, launch=launch,
                )  # fmt: skip

        return self.graph(run)

    def sdpa(self, sequences: int, cached: int, length: int, backends: list[SDPBackend]) -> Callable[[], object]:
        """What torch does with as many prompts whose keys and values are contiguous: each head's own, or, behind cached
        tokens, those of the group."""
        kv_heads = KV_HEADS if cached else HEADS
        query = torch.randn(sequences, HEADS, length, DIM, device=self.device).bfloat16()
        key, value = (
            torch.randn(sequences, kv_heads, cached + length, DIM, device=self.device).bfloat16() for _ in range(2)
        )
        more: dict[str, Any] = {"enable_gqa": kv_heads < HEADS}
        if not cached:
            more["is_causal"] = True
        elif length > 1:
            more["attn_mask"] = causal_lower_right(length, cached + length)

        def run() -> None:
            with nullcontext() if self.device.type == "cpu" else sdpa_kernel(backends):
                for _ in range(self.sizes.prefill_layers):
                    scaled_dot_product_attention(query, key, value, **more)

        return self.graph(run)

    def store(self, tokens: int) -> Callable[[], object]:
        """All layers' new keys and values."""
        key = torch.randn(tokens, KV_HEADS, DIM, device=self.device).bfloat16()
        need = -(-tokens // BLOCK_TOKENS)
        slots = self.tables(1, need * BLOCK_TOKENS)[0].long().repeat_interleave(BLOCK_TOKENS) * BLOCK_TOKENS
        slots += torch.arange(BLOCK_TOKENS, device=self.device).repeat(need)

        def run() -> None:
            for keys, values in zip(self.keys, self.values, strict=True):
                store_kv(key, key, keys, values, slots[:tokens])

        return self.graph(run)


def _replay(graph: torch.cuda.CUDAGraph, kept: Callable[[], object]) -> None:
    del kept
    graph.replay()
