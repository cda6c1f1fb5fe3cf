"""The router's product against float64, and its bits at every T: `router/product.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.chip import chip_of
from fdasync_kernels.router.product import Tile, choose_tile, launch_product, router_logits

from fdasync.errors import BadInput

EPS = torch.finfo(torch.float32).eps
COUNTS = (1, 16, 64, 65, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
SHAPES = ((128, 2048), (72, 2880), (256, 7168))
CHOSEN = {choose_tile(tokens, experts, hidden, 0, large=large): large
          for large in (True, False) for experts, hidden in SHAPES for tokens in COUNTS}  # fmt: skip
# those that are chosen, and others of every form: either side as rows, one block and several beside each other
TILES = [
    *CHOSEN, Tile(16, 16, 4, 4, 2, True), Tile(16, 4, 4, 1, 3, False), Tile(32, 16, 4, 4, 2, True),
    Tile(64, 128, 1, 8, 3, False),
]  # fmt: skip
WIDE_TILES = [Tile(16, 16, 1, 4, 2, False), Tile(32, 32, 1, 4, 2, False)]
DTYPES = [
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
]  # fmt: skip


def factors(tokens: int, experts: int, hidden: int, x_dtype, weight_dtype, device, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, hidden), generator=generator).to(device, x_dtype)
    return x, (torch.randn((experts, hidden), generator=generator) / hidden**0.5).to(device, weight_dtype)


def reach(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far a float32 sum may be off."""
    return 4 * EPS * (x.double().abs() @ weight.double().abs().T)


@pytest.mark.ci(after=6)
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 8, 32), (3, 130, 200), (20, 17, 513), (70, 24, 1024)])
def test_it_is_the_product(device, x_dtype, weight_dtype, tokens, experts, hidden):
    x, weight = factors(tokens, experts, hidden, x_dtype, weight_dtype, device)
    exact = x.double() @ weight.double().T
    wide = router_logits(x, weight, rounded=False, dtype=torch.float32)
    assert bool(((wide.double() - exact).abs() <= reach(x, weight)).all())
    narrow = router_logits(x, weight, rounded=True)
    assert narrow.dtype == x_dtype
    assert torch.equal(narrow, wide.to(x_dtype))
    assert torch.equal(router_logits(x, weight, rounded=True, dtype=torch.float32), narrow.float())


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_writes_every_logit_and_nothing_else(device, tile):
    x, weight = factors(19, 37, 700, torch.bfloat16, torch.bfloat16, device)
    around = torch.full((21, 37), float("nan"), device=device)
    launch_product(x, weight, None, around[1:20], False, tile)
    exact = x.double() @ weight.double().T
    assert bool(((around[1:20].double() - exact).abs() <= reach(x, weight)).all())
    assert around[0].isnan().all()
    assert around[20].isnan().all()


def test_small_devices_get_tiles_that_fit():
    small = [tile for tile, large in CHOSEN.items() if not large]
    assert small
    for tile in small:
        stage = (tile.tokens + tile.experts) * 128 * tile.beside * 2
        assert stage * (tile.stages - 1) <= 96 * 1024, tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_before_the_rounding(device, dtype):
    x, weight = factors(5, 12, 96, dtype, dtype, device)
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    plain = router_logits(x, weight, rounded=False, dtype=torch.float32)
    assert torch.equal(router_logits(x, weight, bias, rounded=True), (plain + bias.float()).to(dtype))


def test_strided_rows_and_no_tokens(device):
    x, weight = factors(9, 12, 96, torch.float32, torch.float32, device)
    whole = router_logits(x[:, 16:80].contiguous(), weight[:, 16:80].contiguous(), rounded=False)
    assert torch.equal(router_logits(x[:, 16:80], weight[:, 16:80], rounded=False), whole)
    # torch gives the single row of such a view the stride of its parent
    one = router_logits(x[4:5, 16:80], weight[:, 16:80], rounded=False)
    torch.testing.assert_close(one, whole[4:5])
    assert router_logits(x[:0], weight, rounded=False).shape == (0, 12)


def test_one_rows_nan_stays_its_own(device):
    x, weight = factors(20, 12, 300, torch.float32, torch.float32, device)
    before = router_logits(x, weight, rounded=False)
    x[7] = float("nan")
    after = router_logits(x, weight, rounded=False)
    assert after[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(after[others], before[others])


def test_bad_input_is_refused(device):
    x, weight = factors(3, 8, 16, torch.float32, torch.float32, device)
    for field, call in {
        "x": [
            lambda: router_logits(x[0], weight, rounded=False),
            lambda: router_logits(x.double(), weight, rounded=False),
            lambda: router_logits(weight.T, weight, rounded=False),
        ],
        "weight": [
            lambda: router_logits(x, weight[:, :9], rounded=False),
            lambda: router_logits(x, weight[:0], rounded=False),
            lambda: router_logits(x, weight.to(torch.int8), rounded=False),
        ],
        "bias": [
            lambda: router_logits(x, weight, weight[0, :7], rounded=False),
            lambda: router_logits(x, weight, weight[:, 0], rounded=False),
        ],
    }.items():
        for refused in call:
            with pytest.raises(BadInput) as caught:
                refused()
            assert caught.value.field == field


@pytest.mark.gpu
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize(("experts", "hidden"), SHAPES)
def test_a_token_has_the_same_bits_at_every_size(device, x_dtype, weight_dtype, experts, hidden):
    x, weight = factors(2048, experts, hidden, x_dtype, weight_dtype, device)
    whole = router_logits(x, weight, rounded=False, dtype=torch.float32)
    for tokens in (1, 3, 16, 64, 256, 700):
        for begin in (0, 5, 1024):
            some = router_logits(x[begin : begin + tokens], weight, rounded=False, dtype=torch.float32)
            assert torch.equal(some, whole[begin : begin + tokens]), (tokens, begin)
    wide = x_dtype == torch.float32
    for tile in WIDE_TILES if wide else TILES:
        stage = (2 * tile.tokens + 4 * tile.experts) * 128 * tile.beside
        if weight_dtype == torch.float32 and not wide and (tile.experts > 64 or stage * (tile.stages - 1) > 1 << 17):
            continue  # three factors of a weight do not fit
        other = torch.full_like(whole, float("nan"))
        launch_product(x, weight, None, other, False, tile)
        assert torch.equal(other, whole), tile


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 7168])
def test_logits_are_as_exact_as_a_float32_product(device, hidden):
    """Tensor cores cut off what is small beside a large sum: blocks of their own keep sums small."""
    x, weight = factors(256, 128, hidden, torch.bfloat16, torch.bfloat16, device)
    exact = x.double() @ weight.double().T
    ours = (router_logits(x, weight, rounded=False, dtype=torch.float32) - exact).abs().max()
    library = (torch.nn.functional.linear(x.float(), weight.float()) - exact).abs().max()
    assert float(ours) <= 4 * float(library)


@pytest.mark.gpu
def test_a_graph_replays_it_and_sizes_compile_nothing(device):
    from fdasync_kernels.router.product import _product_kernel

    x, weight = factors(4096, 128, 2048, torch.bfloat16, torch.bfloat16, device)
    regimes = {choose_tile(tokens, 128, 2048, 0, large=chip_of(device).large): tokens for tokens in range(1, 4097)}
    for tokens in regimes.values():
        router_logits(x[:tokens], weight, rounded=True)
    kernels = [len(cache[0]) for cache in _product_kernel.device_caches.values()]
    for tokens in (1, 2, 7, 16, 33, 255, 1023, 4095):
        router_logits(x[:tokens], weight, rounded=True)
    assert [len(cache[0]) for cache in _product_kernel.device_caches.values()] == kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = router_logits(x[:64], weight, rounded=True)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(logits, router_logits(x, weight, rounded=True)[:64])
