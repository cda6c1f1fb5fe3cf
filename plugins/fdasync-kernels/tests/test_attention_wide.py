"""Attention of heads as models have them against float64: the shapes that kernels of some chips are made for."""

from __future__ import annotations

import attention_layers
import latent_layers
import pytest
import torch
from attention_layers import Shape, dense, make_layer, make_query
from attention_reference import assert_close

BF16 = torch.bfloat16
WIDE = Shape(heads=8, kv_heads=2, key_dim=128, value_dim=128, dtype=BF16)
SHORT = WIDE._replace(reach=("window", 20), sinks=True)
# the last is as many keys as several parts of a kernel's grid share
shapes = pytest.mark.parametrize(
    ("shape", "longest"), [(WIDE, 50), (SHORT, 50), (WIDE, 700)], ids=["wide", "short", "long"]
)
latents = pytest.mark.parametrize(
    ("shape", "longest"),
    [(latent_layers.Shape(heads=40, rank=512, dims=64, dtype=BF16), 50), (latent_layers.Shape(), 700)],
    ids=["wide", "long"],
)


@shapes
def test_prefill(device: torch.device, shape: Shape, longest: int) -> None:
    starts, counts = [0, longest - 10, 3], [20, 1, 9]
    case, sinks = make_layer(shape, [sum(both) for both in zip(starts, counts, strict=True)], device, block_tokens=16)
    query = make_query(shape, sum(counts), device) / shape.key_dim**0.25
    out, row = attention_layers.prefill(shape, case, sinks, query, starts, counts), 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = slice(row, row + count)
        assert_close(out[mine], dense(shape, case, sinks, query[mine], number, start), shape.dtype)
        row += count


@shapes
def test_decode(device: torch.device, shape: Shape, longest: int) -> None:
    lengths = [1, 17, longest]
    case, sinks = make_layer(shape, lengths, device, block_tokens=16)
    query = make_query(shape, len(lengths), device) / shape.key_dim**0.25
    out = attention_layers.decode(shape, case, sinks, query, case.lanes, latent_layers.last(lengths, device))
    whose = [(number, length - 1) for number, length in enumerate(lengths)]
    assert_close(out, attention_layers.expected(shape, case, sinks, query, whose), shape.dtype)


@latents
def test_decode_of_latents(device: torch.device, shape: latent_layers.Shape, longest: int) -> None:
    lengths = [1, 17, longest]
    case = latent_layers.make_latents(shape, lengths, device, block_tokens=16)
    query = latent_layers.make_query(shape, len(lengths), device)
    out = latent_layers.decode(shape, case, query, case.lanes, latent_layers.last(lengths, device))
    whose = [(number, length - 1) for number, length in enumerate(lengths)]
    assert_close(out, latent_layers.expected(case, query, whose), shape.dtype)
