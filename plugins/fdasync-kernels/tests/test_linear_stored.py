"""Dense products with FP8 weights against those of the dequantised ones: `linear/stored.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fdasync_kernels.linear.stored import (
    MOST_ROWS,
    all_stored_tiles,
    dequantised,
    launch_stored,
    stored_linear,
)

from fdasync.errors import BadInput

EPS = torch.finfo(torch.float32).eps


def weight(outputs: int, inputs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Every kind of value but NaN, with scales that make numbers of common size."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    bits = torch.randint(0, 256, (outputs, inputs), generator=draw, dtype=torch.uint8)
    values = torch.where(bits & 127 == 127, bits & 128, bits).view(torch.float8_e4m3fn)
    scales = torch.rand((-(-outputs // 128), -(-inputs // 128)), generator=draw) * 0.002 + 0.0001
    return values.to(device), scales.to(device)


def plain(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The slow way."""
    grid = scales.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]
    return (values.float() * grid).to(torch.bfloat16)


def rows_of(count: int, inputs: int, device: torch.device) -> torch.Tensor:
    return torch.randn((count, inputs), generator=torch.Generator().manual_seed(count)).to(device, torch.bfloat16)


def assert_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within a float32 sum's reach and one rounding."""
    exact = x.double() @ w.double().T
    reach = 8 * EPS * (x.double().abs() @ w.double().abs().T)
    if bias is not None:
        exact += bias.double()
    reach += torch.finfo(torch.bfloat16).eps / 2 * exact.abs() * 1.01
    assert bool(((y.double() - exact).abs() <= reach).all())


@pytest.mark.ci(after=5)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 96), (130, 144), (48, 1024), (256, 1296)])
@pytest.mark.parametrize("count", [1, 3, 9, MOST_ROWS, MOST_ROWS + 1])
def test_it_is_the_product_of_the_dequantised_weight(device, outputs, inputs, count):
    values, scales = weight(outputs, inputs, device)
    assert torch.equal(dequantised(values, scales), plain(values, scales))
    x = rows_of(count, inputs, device)
    y = stored_linear(x, values, scales)
    assert (y.dtype, y.shape) == (torch.bfloat16, (count, outputs))
    if count <= MOST_ROWS:
        assert_product(y, x, plain(values, scales))
    else:
        assert torch.equal(y, torch.nn.functional.linear(x, plain(values, scales)))


@pytest.mark.parametrize("tile", all_stored_tiles(), ids=str)
def test_every_tile_writes_every_value_and_nothing_else(device, tile):
    count, outputs, inputs = tile.rows + 3, tile.columns + 8, 208
    values, scales = weight(outputs, inputs, device)
    x = rows_of(count, inputs, device)
    bias = rows_of(1, outputs, device)[0]
    around = torch.full((count + 2, outputs), float("nan"), device=device, dtype=torch.bfloat16)
    launch_stored(x, values, scales, bias, around[1:-1], tile)
    assert_product(around[1:-1], x, plain(values, scales), bias)
    assert around[0].isnan().all()
    assert around[-1].isnan().all()


def test_rows_may_be_strided_and_have_more_dimensions(device):
    values, scales = weight(40, 96, device)
    wide = rows_of(4, 200, device)
    wanted = stored_linear(wide[:, :96].contiguous(), values, scales)
    assert torch.equal(stored_linear(wide[:, :96], values, scales), wanted)
    assert torch.equal(stored_linear(wide[:, :96].view(2, 2, 96), values, scales), wanted.view(2, 2, 40))
    assert torch.equal(stored_linear(wide[:, :96].T.contiguous().T, values, scales), wanted)
    assert stored_linear(wide[:0, :96], values, scales).shape == (0, 40)


@pytest.mark.gpu
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it():
    """Of the kernel, in whatever tile."""
    device = torch.device("cuda")
    values, scales = weight(4096, 2048, device)
    x = rows_of(MOST_ROWS, 2048, device)
    found = [stored_linear(x[:count], values, scales) for count in (MOST_ROWS, 9, 8, 1)]
    for few in found[1:]:
        assert torch.equal(few, found[0][: len(few)])


@pytest.mark.gpu
def test_a_graph_replays_it_with_new_values():
    device = torch.device("cuda")
    values, scales = weight(512, 256, device)
    for count in (8, 300):
        x = rows_of(count, 256, device)
        stored_linear(x, values, scales)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = stored_linear(x, values, scales)
        scales.mul_(2)
        graph.replay()
        assert torch.equal(y, stored_linear(x, values, scales))


@pytest.mark.ci
def test_it_compiles_without_a_gpu() -> None:
    """For Ada, where a program gets 99 KB, and for Hopper."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_linear_stored.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(all_stored_tiles())
    for shared, products, spilled in lines:
        assert shared <= 99 << 10
        assert products
        assert not spilled


def test_what_the_kernels_do_not_take_is_refused(device):
    values, scales = weight(40, 96, device)
    x = rows_of(2, 96, device)
    wrong = {
        "x": [(x.float(), values, scales, None), (x[:, :80], values, scales, None)],
        "values": [
            (x, values.float(), scales, None),
            (x, values.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn), scales, None),
            (x[:, :72], values[:, :72].contiguous(), scales, None),
        ],
        "scales": [(x, values, scales.double(), None), (x, values, scales.repeat(2, 1), None)],
        "bias": [(x, values, scales, x[0, :40].float()), (x, values, scales, x[0])],
    }
    for field, cases in wrong.items():
        for case in cases:
            with pytest.raises(BadInput) as error:
                stored_linear(*case)
            assert error.value.field == field
