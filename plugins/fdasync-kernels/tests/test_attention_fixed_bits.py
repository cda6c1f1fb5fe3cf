"""The fixed order of attention on a GPU: the same bits from every kernel and tile, alone and beside others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_layers import Shape, dense, make_layer, make_query
from attention_reference import assert_close
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.fixed import grain_of
from fdasync_kernels.attention.latent import LatentLaunch, attend_latents
from fdasync_kernels.attention.packed import PackedLayout, attend_packed
from fdasync_kernels.attention.prefill import prefill_launch
from fdasync_kernels.attention.tile import Launch
from fixed_attention import SCALE, SHAPES, decode, prefill

BF16 = torch.bfloat16
LENGTH = 2100
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
POSITIONS = [
    0,
    1,
    15,
    16,
    63,
    64,
    127,
    128,
    255,
    256,
    257,
    511,
    512,
    513,
    700,
    1023,
    1024,
    1025,
    1500,
    2047,
    2048,
    2099,
]


def whole(shape: Shape, device: torch.device) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """A layer, its sinks, the queries of one sequence, and their outputs (float32) by the kernel of all devices."""
    case, sinks = make_layer(shape, [LENGTH], device, block_tokens=16)
    query = make_query(shape, LENGTH, device) / shape.key_dim**0.25
    launch = prefill_launch(shape.key_dim, shape.dtype)
    return case, sinks, query, prefill(shape, case, sinks, query, [0], [LENGTH], launch=launch)


@pytest.mark.gpu
@shapes
def test_prefill_and_its_chunks(device: torch.device, shape: Shape) -> None:
    case, sinks, query, want = whole(shape, device)
    assert_close(want, dense(shape, case, sinks, query, 0, 0), shape.dtype)
    # on Hopper another kernel, where it fits
    assert torch.equal(prefill(shape, case, sinks, query, [0], [LENGTH]), want)
    for begin, count in ((1000, 301), (1, 129), (511, 3), (LENGTH - 129, 129)):
        part = prefill(shape, case, sinks, query[begin : begin + count], [begin], [count])
        assert torch.equal(part, want[begin : begin + count]), (begin, count)
    keys = grain_of(shape.key_dim, shape.dtype).keys
    narrow = shape.key_dim > 128 or shape.dtype == torch.float32
    for rows, warps in ((16, 4), (32, 4)) if narrow else ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8)):
        out = prefill(shape, case, sinks, query[:700], [0], [700], launch=Launch(rows, keys, warps, 2))
        assert torch.equal(out, want[:700]), (rows, warps)


@pytest.mark.gpu
@shapes
def test_decode(device: torch.device, shape: Shape) -> None:
    case, sinks, query, want = whole(shape, device)
    at = torch.tensor(POSITIONS, device=device)
    whose = [(0, position) for position in POSITIONS]
    for splits in (None, 1, 2, 7):
        assert torch.equal(decode(shape, case, sinks, query[at], whose, splits=splits), want[at]), splits
    for position in POSITIONS:
        one = slice(position, position + 1)
        assert torch.equal(decode(shape, case, sinks, query[one], [(0, position)]), want[one]), position


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(device: torch.device, heads: int) -> None:
    shape = SHAPES[f"MLA, {heads} heads"]
    case, _, query, want = whole(shape, device)
    at = torch.tensor(POSITIONS, device=device)
    workspace = decode_workspace(len(at), heads, 512, device, fixed=True)

    def attend(rows: torch.Tensor, **more: Any) -> torch.Tensor:
        out = torch.full((len(rows), heads, 512), torch.nan, device=device)
        part = query[rows]
        attend_latents(
            part[..., :512], part[..., 512:], case.keys, case.tables, case.lanes.repeat(len(rows)), rows, scale=SCALE,
            out=out, workspace=workspace, fixed=True, **more,
        )  # fmt: skip
        return out

    for splits in (None, 1, 2, 5):
        assert torch.equal(attend(at, splits=splits), want[at]), splits
    for row in at.split(1):
        assert torch.equal(attend(row), want[row])
    for tile, warps in ((16, 4), (32, 4), (64, 8)):
        assert torch.equal(attend(at, launch=LatentLaunch(tile, 32, warps, 2, 1)), want[at]), tile


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES["Qwen3"], SHAPES["gpt-oss"], SHAPES["MLA, 16 heads"]],
                         ids=["Qwen3", "gpt-oss", "MLA"])  # fmt: skip
def test_packed(device: torch.device, shape: Shape) -> None:
    lengths = [700, 1, 513, 130]
    case, sinks = make_layer(shape, lengths, device, block_tokens=16)
    query = make_query(shape, sum(lengths), device) / shape.key_dim**0.25
    want = prefill(shape, case, sinks, query, [0] * 4, lengths).to(shape.dtype)
    keys, values = (torch.cat(flat).to(device) for flat in (case.flat_keys, case.flat_values))
    out = attend_packed(
        query, keys, None if shape.latent else values,
        PackedLayout.cut(np.cumsum([0, *lengths]), sum(lengths), device), scale=SCALE,
        reach_kind=shape.reach[0], reach_size=shape.reach[1], sinks=sinks, value_dim=shape.value_dim,
    )  # fmt: skip
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_a_graph_of_decodes(device: torch.device) -> None:
    shape = SHAPES["Qwen3"]
    case, _, query, want = whole(shape, device)
    workspace = decode_workspace(4, 32, 128, device, fixed=True)
    lanes, positions = case.lanes.repeat(4), torch.zeros(4, dtype=torch.int64, device=device)
    rows, out = torch.empty(4, 32, 128, dtype=BF16, device=device), torch.empty(4, 32, 128, device=device)

    def step() -> None:
        attend_decode(
            rows, case.keys, case.values, case.tables, lanes, positions, scale=SCALE, reach_kind="full", reach_size=0,
            sinks=None, out=out, workspace=workspace, fixed=True,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for at in ([0, 511, 512, 2099], [1024, 3, 2000, 63]):
        positions.copy_(torch.tensor(at))
        rows.copy_(query[at])
        graph.replay()
        assert torch.equal(out, want[at])
    lanes[2] = -1
    graph.replay()
    assert torch.equal(out[[0, 1, 3]], want[[1024, 3, 63]])
    assert not out[2].any()
