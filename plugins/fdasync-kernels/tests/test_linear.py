"""Dense products against float64, and their bits at every number of rows: `linear/`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fdasync_kernels.linear.product import batched, launch_linear, linear
from fdasync_kernels.linear.tiles import all_tiles, choose_tile

from fdasync.errors import BadInput

EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NARROW = DTYPES[:2]
ROWS = (1, 2, 3, 8, 13, 16, 17, 64, 65, 257, 1000, 2049)
MOST = max(ROWS)
TILES = [(tile, dtype) for dtype in (torch.bfloat16, torch.float32) for tile in all_tiles(dtype)]


def factors(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, inputs), generator=generator).to(device, dtype)
    return x, (torch.randn((outputs, inputs), generator=generator) / inputs**0.5).to(device, dtype)


def cancelling_factors(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device):
    """Products cancel, each with one at a random place of the inner dimension, and sizes spread over powers of 2: a
    result is nothing but what its sum cut off, so another order has other results."""
    generator = torch.Generator().manual_seed(1)

    def spread(count: int) -> torch.Tensor:
        sizes = torch.rand((count, inputs), generator=generator) * -10.0
        return (torch.randn((count, inputs), generator=generator) * sizes.exp2_()).to(dtype)

    x, weight = spread(rows), spread(outputs)
    first, second = torch.randperm(inputs, generator=generator).chunk(2)
    x[:, second] = x[:, first]
    weight[:, second] = -weight[:, first]
    return x.to(device), weight.to(device)


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """`y` is the product, within a float32 sum's reach and one rounding."""
    exact = x.double() @ weight.double().T
    reach = 8 * EPS * (x.double().abs() @ weight.double().abs().T)
    if bias is not None:
        exact += bias.double()
    reach += torch.finfo(y.dtype).eps / 2 * exact.abs()
    assert bool(((y.double() - exact).abs() <= reach).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 40, 96), (5, 17, 513), (16, 33, 256), (20, 24, 72), (70, 40, 96)],
)
def test_it_is_the_product(device, dtype, rows, outputs, inputs):
    x, weight = factors(rows, outputs, inputs, dtype, device)
    y = linear(x, weight)
    assert (y.dtype, y.shape) == (dtype, (rows, outputs))
    assert_product(y, x, weight)


@pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)
def test_every_tile_writes_every_value_and_nothing_else(device, tile, dtype):
    # more than a tile of rows and of outputs, neither whole
    rows, outputs, inputs = tile.rows + min(tile.rows, 13), tile.columns + 8, 200
    x, weight = factors(rows, outputs, inputs, dtype, device)
    around = torch.full((rows + 2, outputs), float("nan"), device=device, dtype=dtype)
    launch_linear(x, weight, None, around[1:-1], tile)
    assert_product(around[1:-1], x, weight)
    assert around[0].isnan().all()
    assert around[-1].isnan().all()


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("bulk", [True, False])
def test_tiles_fit_their_devices(large, bulk):
    for dtype, rows, outputs in itertools.product(DTYPES, (1, 8, 16, 17, 64, 65, 300, 1024, 65536), (16, 2048, 151936)):
        tile = choose_tile(rows, outputs, dtype, large=large, bulk=bulk, processors=132)
        assert tile in all_tiles(dtype)
        assert (bulk and large) or not tile.many
        stage = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
        held = tile.rows * tile.columns // tile.parts * dtype.itemsize if tile.many else 0
        steps = tile.stages if tile.many else tile.stages - 1
        assert tile.together * (steps * stage + held) <= (226 if large else 99) * 1024, tile


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_rounding(device, dtype):
    x, weight = factors(5, 12, 96, dtype, device)
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    assert_product(linear(x, weight, bias), x, weight, bias)
    # by programs that take tile after tile, too
    x, weight = factors(70, 24, 96, dtype, device)
    for tile in [tile for tile in all_tiles(dtype) if tile.many]:
        out = torch.empty((70, 24), device=device, dtype=dtype)
        launch_linear(x, weight, weight[:, 0].contiguous(), out, tile)
        assert_product(out, x, weight, weight[:, 0])


def test_leading_dimensions_and_an_output_of_the_caller(device):
    x, weight = factors(6, 12, 96, torch.float32, device)
    whole = linear(x, weight)
    assert torch.equal(linear(x.view(2, 3, 96), weight), whole.view(2, 3, 12))
    assert torch.equal(linear(x[0], weight), whole[0])
    around = torch.full((6, 20), float("nan"), device=device)
    assert linear(x, weight, out=around[:, 4:16]).data_ptr() == around[:, 4:].data_ptr()
    assert torch.equal(around[:, 4:16], whole)
    assert around[:, :4].isnan().all()
    assert around[:, 16:].isnan().all()


@pytest.mark.parametrize("rows", [3, 20])
def test_a_transposed_weight(device, rows):
    x, weight = factors(rows, 24, 96, torch.bfloat16, device)
    assert_product(linear(x, weight.T.contiguous().T), x, weight)
    assert_product(linear(x, weight[::2]), x, weight[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_of_products(device, dtype):
    a, b = factors(3 * 5, 3 * 20, 24, dtype, device)
    a, b = a.view(3, 5, 24), b.view(3, 20, 24)
    for other in (b.transpose(1, 2), b.transpose(1, 2).contiguous(), b[:1].expand(3, -1, -1).transpose(1, 2)):
        c = batched(a, other)
        for number in range(3):
            assert_product(c[number], a[number], other[number].T)
    # heads between the tokens, as a latent attention has them
    heads = a.transpose(0, 1).contiguous().transpose(0, 1)
    into = torch.empty((5, 3, 20), device=device, dtype=dtype).transpose(0, 1)
    assert torch.equal(batched(heads, b.transpose(1, 2), out=into), batched(a, b.transpose(1, 2)))


def test_strided_rows_and_no_rows(device):
    x, weight = factors(9, 12, 96, torch.float32, device)
    part = weight[:, 16:80].contiguous()
    whole = linear(x[:, 16:80].contiguous(), part)
    assert torch.equal(linear(x[:, 16:80], part), whole)
    # torch gives the single row of such a view the stride of its parent
    torch.testing.assert_close(linear(x[4:5, 16:80], part), whole[4:5])
    assert linear(x[:0], weight).shape == (0, 12)


def test_one_rows_nan_stays_its_own(device):
    x, weight = factors(16, 12, 300, torch.bfloat16, device)
    before = linear(x, weight)
    x[7] = float("nan")
    after = linear(x, weight)
    assert after[7].isnan().all()
    others = [row for row in range(16) if row != 7]
    assert torch.equal(after[others], before[others])


def test_bad_input_is_refused(device):
    x, weight = factors(3, 8, 16, torch.float32, device)
    a, b = x.expand(2, 3, 16), weight.T.expand(2, 16, 8)
    for field, call in {
        "x": [
            lambda: linear(x, weight[:, :9]),
            lambda: linear(x[0, 0], weight),
            lambda: linear(x, weight.T),
            lambda: linear(x, weight.half()),
        ],
        "weight": [
            lambda: linear(x, weight[:0]),
            lambda: linear(x, weight[::2, ::2]),
            lambda: linear(x.double(), weight.double()),
            lambda: linear(x, weight, weight[0, :7]),
            lambda: linear(x, weight, weight[:, 0]),
            lambda: linear(x, weight, weight[0, :8].half()),
        ],
        "out": [
            lambda: linear(x, weight, out=torch.empty(3, 9, device=device)),
            lambda: linear(x, weight, out=torch.empty(3, 8, device=device).half()),
            lambda: linear(x, weight, out=torch.empty(8, 3, device=device).T),
            lambda: linear(a, weight, out=torch.empty(3, 2, 8, device=device).transpose(0, 1)),
            lambda: batched(a, b, out=torch.empty(2, 8, 3, device=device).transpose(1, 2)),
        ],
        "a": [lambda: batched(x, weight.T), lambda: batched(a.transpose(1, 2), b), lambda: batched(a.double(), b)],
        "b": [
            lambda: batched(a, weight.T),
            lambda: batched(a, b[:1]),
            lambda: batched(a, b[:, :9]),
            lambda: batched(a, b.half()),
            lambda: batched(a, torch.empty(2, 32, 16, device=device)[:, ::2, ::2]),
        ],
    }.items():
        for refused in call:
            with pytest.raises(BadInput) as caught:
                refused()
            assert caught.value.field == field


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(5120, 2048), (2048, 4096), (1000, 2880)])
@pytest.mark.parametrize("cancelling", [False, True])
def test_a_row_has_the_same_bits_at_every_number_of_rows(device, dtype, outputs, inputs, cancelling):
    x, weight = (cancelling_factors if cancelling else factors)(MOST, outputs, inputs, dtype, device)
    whole = linear(x, weight)
    for rows in ROWS:
        for begin in {0, 5, MOST - rows}:
            assert torch.equal(linear(x[begin : begin + rows], weight), whole[begin : begin + rows]), rows
    for tile in all_tiles(dtype):
        other = torch.full_like(whole[:300], float("nan"))
        launch_linear(x[:300], weight, None, other, tile)
        assert torch.equal(other, whole[:300]), tile
    across = weight.T.contiguous()
    assert torch.equal(linear(x[:300], across.T), whole[:300])
    assert torch.equal(batched(x[None, :300], across[None])[0], whole[:300])
    # rows that the copy engine cannot read
    odd = torch.empty(300, inputs + 1, device=device, dtype=dtype)[:, 1:].copy_(x[:300])
    assert torch.equal(linear(odd, weight), whole[:300])


@pytest.mark.ci
def test_a_bias_is_no_first_addend():
    """Compiled for Hopper without one, of a single step of the inner dimension."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_bias.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = dict.fromkeys(("linear_kernel", "experts_down", "experts_gate_up"), 0)
    kernels |= dict.fromkeys(("linear_many_kernel", "experts_gate_up_many", "experts_down_many"), 0)
    for line in done.stdout.splitlines():
        name, *begins = line.split()
        kernels[name] += 1
        assert set(begins) == {"0.000000e+00"}, line
    # either way round, and gates and ups side by side too
    assert list(kernels.values()) == [2, 2, 3, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [16, 64, 256, 520])
def test_a_bias_comes_last_in_every_tile(device, dtype, inputs):
    x, weight = factors(300, 264, inputs, dtype, device)
    # next to nothing of it is left in the first row, and much of the roundings
    bias = -linear(x[:1], weight)[0]
    whole = linear(x, weight, bias)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], weight, bias), whole[:rows]), rows
    for tile in all_tiles(dtype):
        other = torch.full_like(whole, float("nan"))
        launch_linear(x, weight, bias, other, tile)
        assert torch.equal(other, whole), tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
def test_a_graph_replays_it_with_new_weights_and_sizes_compile_nothing(device, dtype):
    from fdasync_kernels.linear.kernel import linear_kernel

    x, weight = factors(16, 512, 1024, dtype, device)
    for rows in (1, 8, 16):
        linear(x[:rows], weight)
    kernels = [len(cache[0]) for cache in linear_kernel.device_caches.values()]
    for rows in range(1, 17):
        linear(x[:rows], weight)
    assert [len(cache[0]) for cache in linear_kernel.device_caches.values()] == kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = linear(x, weight)
        second = linear(first[:, :512].repeat(1, 2), weight)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        # in place, right before the replay
        weight.copy_(torch.randn_like(weight) / 32)
        graph.replay()
        wanted = linear(x, weight)
        assert torch.equal(first, wanted)
        assert torch.equal(second, linear(wanted.repeat(1, 2), weight))
