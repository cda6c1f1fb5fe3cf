"""Experts whose weights stay as they were stored, against plain ones: `experts/stored_kernels.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fdasync_kernels.experts.activation import Activation
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.experts.inner_order import ordered_rows
from fdasync_kernels.experts.stored import StoredWeights
from fdasync_kernels.experts.tiles import Tiles, all_stored_tiles

from fdasync.errors import BadInput

E, K = 5, 3
# widths of rows and between the products: within blocks and groups, and past them
WIDTHS = {"even": (256, 128), "uneven": (192, 64)}
FORMS = ("fp8", "mxfp4")


def stored(form: str, shape: tuple[int, int, int], draw: torch.Generator, device: torch.device) -> StoredWeights:
    """Random bits of every kind but NaN, with scales that make numbers of common size."""
    experts_, rows, inner = shape
    if form == "fp8":
        bits = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        values = torch.where(bits & 127 == 127, bits & 128, bits).view(torch.float8_e4m3fn)
        scales = torch.rand((experts_, -(-rows // 128), -(-inner // 128)), generator=draw) * 0.002 + 0.0001
    else:
        blocks = torch.randint(0, 256, (experts_, rows, inner // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts_, rows, inner // 32), generator=draw, dtype=torch.uint8)
        return StoredWeights.of_mxfp4(blocks.to(device), scales.to(device))
    return StoredWeights(form, values.to(device), scales.to(device))  # type: ignore[arg-type]


def plain(weights: StoredWeights) -> torch.Tensor:
    return torch.stack([weights.dequantised(expert) for expert in range(weights.shape[0])])


def case(device: torch.device, form: str, tokens: int, width: int, inner: int, **more: Any) -> tuple[Any, Any]:
    """Arguments of `experts` with stored weights, and with plain ones; a row and some ids mean nothing."""
    draw = torch.Generator().manual_seed(tokens)
    rows = 2 * inner if more.get("gated", True) else inner
    up, down = stored(form, (E, rows, width), draw, device), stored(form, (E, width, inner), draw, device)
    hidden = torch.randn((tokens, width), generator=draw).to(device, torch.bfloat16)
    ids = torch.stack([torch.randperm(E + 1, generator=draw)[:K] for _ in range(tokens)]).to(device)
    weights = torch.rand((tokens, K), generator=draw).to(device, torch.bfloat16)
    live = torch.zeros(tokens, dtype=torch.int64)
    live[tokens // 2] = -1 if tokens > 1 else 0
    more = {"live": live.to(device), **more}
    if more.pop("biased", False):
        more |= {"up_bias": torch.randn((E, rows), generator=draw).to(device, torch.bfloat16)}
        more |= {"down_bias": torch.randn((E, width), generator=draw).to(device, torch.bfloat16)}
    shared = (hidden, ids, weights)
    return (shared, (up, down), more), (shared, (plain(up), plain(down)), more)


def run(arguments: Any, tiles: Tiles | None = None, **further: Any) -> torch.Tensor:
    shared, weights, more = arguments
    return experts(*shared, *weights, tiles=tiles, **more, **further)


def compare(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits on a device. The interpreter's products are numpy's, whose order goes by the shape."""
    assert bool(got.isfinite().all())
    if got.device.type == "cuda":
        assert torch.equal(got, wanted)
    else:
        assert float((got - wanted).float().norm() / wanted.float().norm()) < 1e-2
        assert float((got == wanted).float().mean()) > 0.9


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_results_are_those_of_the_dequantised_weights(device, form, widths, tokens):
    kept, dequantised = case(device, form, tokens, *WIDTHS[widths])
    compare(run(kept), run(dequantised))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "more",
    [
        {"interleaved": True, "biased": True, "activation": Activation("silu", "swiglu_oai", 1.7, 7.0)},
        {"gated": False, "activation": Activation("relu2")},
        {"parts": True},
        {"biased": True},
    ],
    ids=["interleaved", "no gate", "parts", "biased"],
)
def test_every_kind_of_experts(device, form, more):
    kept, dequantised = case(device, form, 14, *WIDTHS["uneven"], **more)
    got, wanted = run(kept), run(dequantised)
    if more.get("parts"):
        counted = (kept[0][1] < E) & (kept[2]["live"] >= 0)[:, None]
        got, wanted = got[counted], wanted[counted]
    compare(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{}, {"gated": False, "activation": Activation("relu2")}], ids=["gated", "no gate"])
@pytest.mark.parametrize("tokens", [9, 150])
def test_every_tile_gives_the_same(form, tokens, more):
    kept, dequantised = case(torch.device("cuda"), form, tokens, *WIDTHS["uneven"], **more)
    wanted = run(dequantised)
    for bulk in (False, form == "fp8"):
        for tiles in all_stored_tiles(gated=not more, bulk=bulk):
            compare(run(kept, tiles), wanted)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("number", range(1, 5))
def test_weights_come_by_the_bulk_copy_engine(device, number):
    """Tiles are cut off in every dimension; rows in order and such that are read so."""
    kept, dequantised = case(device, "fp8", 3, 208, 144, biased=number == 2)
    compare(run(kept, all_stored_tiles(bulk=True)[number]), run(dequantised))


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("side", ["up", "down"])
def test_either_product_may_have_its_weights_by_the_bulk_copy_engine(device, side):
    kept, dequantised = case(device, "fp8", 5, *WIDTHS["uneven"])
    tiles = all_stored_tiles(bulk=True)[1]
    other = replace(tiles, **{side: replace(getattr(tiles, side), tma=False)})
    compare(run(kept, other), run(dequantised))


def test_rows_in_order(device):
    rows = torch.arange(3 * 64, device=device, dtype=torch.float32).view(3, 64)[:, :48].to(torch.bfloat16)
    found = ordered_rows(rows)
    assert found[0, :16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    assert torch.equal(found.view(3, 3, 16)[1:, :], (found[0, :16] + rows[1:, ::16, None]).to(torch.bfloat16))


def test_who_may_use_the_bulk_copy_engine(device):
    (_, (up, down), _), _ = case(device, "fp8", 2, *WIDTHS["even"])
    assert up.fits_bulk
    assert down.fits_bulk
    beside = torch.empty(up.values.numel() + 8, dtype=torch.uint8, device=device)[8:]
    moved = StoredWeights("fp8", beside.view(torch.float8_e4m3fn).view(up.shape), up.scales)
    assert not moved.fits_bulk
    shared, _, more = case(device, "fp8", 12, *WIDTHS["even"])[0]
    # tiles that read by it would fail
    assert experts(*shared, moved, down, **more).isfinite().all()
    (_, (up, _), _), _ = case(device, "mxfp4", 2, *WIDTHS["even"])
    assert not up.fits_bulk


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("form", FORMS)
def test_slices_are_added_as_those_of_plain_weights(device, form):
    kept, dequantised = case(device, form, 12, 128, 256)
    compare(run(kept, slices=2), run(dequantised, slices=2))
    narrow, _ = case(device, form, 12, 128, 64)
    with pytest.raises(BadInput, match="slices of 32"):
        run(narrow, slices=2)


def test_values_are_what_their_bits_say():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    exponents = torch.tensor([127, 128], dtype=torch.uint8).repeat(1, 8, 1)
    found = StoredWeights.of_mxfp4(blocks, exponents).dequantised(0)
    # bytes in order, of each the lower half first: 0x01, 0x02 are a half, zero, one, zero
    assert found[0, 2:6].tolist() == [0.5, 0.0, 1.0, 0.0]
    # 0xF7: 7 is six, 15 is minus six; 0xF8 is minus zero; the second group's exponent is one
    assert found[7, 46:48].tolist() == [12.0, -12.0]
    assert found[7, 48:50].tolist() == [-0.0, -12.0]
    values = torch.ones((1, 129, 144)).to(torch.float8_e4m3fn)
    grid = StoredWeights("fp8", values, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).dequantised(0)
    assert [grid[at].item() for at in ((0, 0), (127, 127), (0, 128), (128, 0), (128, 143))] == [1, 1, 2, 3, 4]
    with pytest.raises(BadInput, match="129 is too large"):
        StoredWeights.of_mxfp4(blocks, exponents + 1)


@pytest.mark.parametrize(
    ("form", "values", "scales", "match"),
    [
        ("fp8", torch.zeros((1, 4, 16)), torch.ones((1, 1, 1)), "float8"),
        ("fp8", torch.zeros((1, 4, 24)).to(torch.float8_e4m3fn), torch.ones((1, 1, 1)), "multiples of 16"),
        ("fp8", torch.zeros((1, 129, 16)).to(torch.float8_e4m3fn), torch.ones((1, 1, 1)), "scales"),
        ("mxfp4", torch.zeros((1, 4, 16), dtype=torch.uint8), torch.ones((1, 4, 1), dtype=torch.uint8), "multiples"),
        ("mxfp4", torch.zeros((4, 16), dtype=torch.uint8), torch.ones((4, 1), dtype=torch.uint8), "experts, N, K"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(form, values, scales, match):
    with pytest.raises(BadInput, match=match):
        StoredWeights(form, values, scales)


def test_what_the_kernels_do_not_take_is_refused(device):
    (shared, (up, down), more), (_, (plain_up, plain_down), _) = case(device, "fp8", 2, *WIDTHS["even"])
    for wrong in ((up, plain_down), (plain_up, down)):
        with pytest.raises(BadInput, match="both products"):
            experts(*shared, *wrong, **more)
    with pytest.raises(BadInput, match="bfloat16"):
        experts(shared[0].float(), *shared[1:], up, down, **more)


def test_tiles_fill_the_left_side_of_the_product():
    for tiles in (*all_stored_tiles(), *all_stored_tiles(bulk=True)):
        assert 16 <= tiles.rows <= 128
        for tile in (tiles.up, tiles.down):
            assert tile.swap
            assert 128 % tile.depth == 0
            assert tile.depth >= 64
        # rows of gate and up fill them together; experts without gates have half as many
        assert tiles.up.paired
        assert tiles.up.columns >= 32
        assert tiles.down.columns >= 64
