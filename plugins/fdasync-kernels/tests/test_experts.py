"""The experts' kernels against float64, one pair at a time: `experts/chain.py`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from experts_cases import (
    APART,
    BULK,
    INNER,
    MANY,
    PAIRED,
    SINGLE,
    SMALL,
    SWAPPED,
    TOLERANCE,
    Case,
    E,
    H,
    K,
    make,
    reference,
)
from fdasync_kernels.experts.activation import KINDS, Activation, activation_of
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.experts.tiles import Tiles, all_tiles, choose_tiles
from fdasync_kernels.router.route import route

from fdasync.errors import BadInput


def check(case: Case, tiles: Tiles | None) -> None:
    wanted = reference(case)
    got = case.run(tiles=tiles).double().cpu()
    assert bool(got.isfinite().all())
    assert float((got - wanted.sum(1)).norm() / wanted.sum(1).norm()) < TOLERANCE[case.hidden.dtype]


@pytest.mark.ci(after=8)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [1, 7, pytest.param(40, marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    "tiles",
    [None, SINGLE, PAIRED, SMALL, SWAPPED, BULK, APART, MANY],
    ids=["table", "single", "paired", "small", "swap", "bulk", "apart", "many"],
)
def test_it_computes_what_was_chosen(device, tokens, tiles):
    check(make(device, tokens, padded=tokens > 1), tiles)


@pytest.mark.ci(after=2)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [None, SWAPPED, MANY])
def test_half_precision(device, dtype, tiles):
    check(make(device, 19, dtype, padded=True), tiles)


@pytest.mark.ci(after=4)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "options",
    [
        {"transposed": True, "interleaved": True, "biased": True},
        {"gated": False, "biased": True, "transposed": True},
        {"interleaved": True},
        {"gated": False},
        {"transposed": True},
        {"biased": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "tiles",
    [SWAPPED, *(pytest.param(tiles, marks=pytest.mark.ci) for tiles in (SINGLE, PAIRED, MANY, None))],
    ids=["grouped", "single", "paired", "many", "table"],
)
def test_layouts_of_families(device, options, tiles):
    if tiles is MANY and (options.get("transposed") or options.get("interleaved")):
        pytest.skip("the bulk copy engine cannot read them")
    check(make(device, 9, padded=True, **options), tiles)


def test_parts_are_what_the_slots_add(device):
    case = make(device, 11)
    wanted, got = reference(case), case.run(parts=True).double().cpu()
    counted = ((case.ids >= 0) & (case.ids < E)).cpu()
    torch.testing.assert_close(got[counted], wanted[counted], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 21])
def test_the_experts_that_ran_are_those_that_were_recorded(device, tokens):
    """Every weight of expert e is the constant e: a slot's part says which expert made it."""
    numbers = torch.arange(1.0, E + 1, device=device)
    up = torch.ones((E, 2 * INNER, H), device=device)
    down = numbers[:, None, None].expand(E, H, INNER).contiguous()
    logits = torch.randn((tokens, E), generator=torch.Generator().manual_seed(tokens)).to(device)
    row = torch.full((tokens, K + 1), 99, dtype=torch.uint8, device=device)
    weights, ids = route(logits, K, weights_dtype=torch.float32, capture=row)
    hidden = torch.full((tokens, H), 1 / H, device=device)
    parts = experts(hidden, ids, torch.ones_like(weights), up, down, parts=True)
    # silu(1) * 1, over INNER columns
    one = float(torch.nn.functional.silu(torch.ones(()))) * INNER
    ran = (parts / one).round().long() - 1
    assert torch.equal(ran, row[:, :K].long()[..., None].expand_as(ran))


FORMS = [Activation(kind) for kind in KINDS] + [
    Activation("silu", "wide"),
    Activation("gelu", "clamped", limit=1.5),
    Activation("silu", "clamped_after", limit=1.5),
    Activation("silu", "swiglu_oai", 1.702, 2.0),
]


@pytest.mark.parametrize("activation", FORMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations(device, activation, interleaved):
    rows = (torch.randn((40, 2 * 24), generator=torch.Generator().manual_seed(4)) * 4).to(device)
    wide = rows.double()
    gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    limit = activation.limit
    if activation.form in ("clamped", "swiglu_oai"):
        gate = gate.clamp(max=limit)
    if activation.form in ("clamped", "clamped_after", "swiglu_oai"):
        up = up.clamp(-limit, limit)
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda value: torch.nn.functional.gelu(value, approximate="tanh"),
        "quick_gelu": lambda value: value * torch.sigmoid(1.702 * value),
        "relu": torch.relu,
        "relu2": lambda value: torch.relu(value) ** 2,
    }
    value = functions[activation.kind](gate)
    if activation.form == "clamped_after":
        value = value.clamp(max=limit)
    if activation.form == "swiglu_oai":
        value, up = gate * torch.sigmoid(gate * activation.alpha), up + 1
    got = activation_of(rows, activation, gated=True, interleaved=interleaved)
    torch.testing.assert_close(got.double(), value * up, rtol=2e-5, atol=1e-6)


def test_bad_arguments_are_named(device):
    case = make(device, 3)
    for name, value in [
        ("ids", case.ids[:, ::2]),
        ("weights", case.weights[:2]),
        ("hidden", case.hidden.double()),
        ("up", case.up[:, :-2]),
        ("down", case.down[0]),
    ]:
        wrong = Case(case.hidden, case.ids, case.weights, case.up, case.down, {})
        setattr(wrong, name, value)
        with pytest.raises(BadInput, match=name):
            wrong.run()
    with pytest.raises(BadInput, match="live"):
        case.run(live=torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(BadInput, match="up_bias"):
        case.run(up_bias=torch.zeros((E, 2 * INNER), device=device))


def test_no_tokens(device):
    assert make(device, 3).run(parts=True).shape == (3, K, H)
    none = make(device, 1)
    none.hidden, none.ids, none.weights = none.hidden[:0], none.ids[:0], none.weights[:0]
    assert none.run().shape == (0, H)


def test_every_regime_has_tiles() -> None:
    seen = set()
    for tokens in (1, 4, 8, 192, 256, 512, 1024, 8192):
        for dtype in (torch.bfloat16, torch.float32):
            tiles = choose_tiles(tokens, 8, 128, dtype, large=True, bulk=True)
            plain = choose_tiles(tokens, 8, 128, dtype, large=True, bulk=False)
            small = choose_tiles(tokens, 8, 128, dtype, large=False, bulk=True)
            assert not small.up.tma
            assert small.rows == tiles.rows or tiles.single
            # gate and up rows, and the pairs' own
            for tile, columns in ((small.up, 2 * small.up.columns), (small.down, small.down.columns)):
                assert (columns + small.rows) * tile.depth * tile.stages * 2 <= 96 << 10
            assert not plain.up.tma
            assert not plain.down.tma
            assert tiles.rows == plain.rows
            assert tiles.single == (tokens <= 4)
            seen.add((tiles.rows, tiles.single))
    assert seen == {(8, True), (16, True), (16, False), (32, False), (64, False), (128, False)}
    for large, bulk in ((True, True), (True, False), (False, False)):
        found = all_tiles(torch.bfloat16, large=large, bulk=bulk)
        assert {(one.rows, one.single) for one in found} == seen - {(16 if large else 8, True)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (64, 6, 1024, 1408)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(device, dtype, shape):
    """Alone, in batches of every regime, padded, in another order, and in chunks."""
    num_experts, k, width, inner = shape
    draw = torch.Generator(device).manual_seed(7)
    most = 2100 if dtype != torch.float32 else 300

    def random(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(size, generator=draw, device=device) * scale).to(dtype)

    up, down = random(num_experts, 2 * inner, width, scale=0.05), random(num_experts, width, inner, scale=0.05)
    hidden = random(most, width, scale=1.0)
    best = torch.rand((most, num_experts), generator=draw, device=device).topk(k)
    ids, weights = best.indices, best.values.to(dtype)
    whole = experts(hidden, ids, weights, up, down)
    for first, last in [(0, 1), (1, 4), (5, 12), (0, 64), (17, 209), (40, 296), (0, 300)]:
        part = experts(hidden[first:last], ids[first:last], weights[first:last], up, down)
        assert torch.equal(part, whole[first:last]), (first, last)
    if dtype != torch.float32:
        for last in (600, 1024, 2048):
            assert torch.equal(experts(hidden[:last], ids[:last], weights[:last], up, down), whole[:last]), last
    order = torch.randperm(most, generator=draw, device=device)
    assert torch.equal(experts(hidden[order], ids[order], weights[order], up, down), whole[order])
    live = torch.where(torch.arange(most, device=device) % 3 == 0, -1, 0)
    padded = experts(hidden, ids, weights, up, down, live=live)
    assert torch.equal(padded[live == 0], whole[live == 0])
    assert not padded[live < 0].any()


@triton.jit
def _silu_by_true_division(gates, ups, out, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    gate, up = tl.load(gates + at).to(tl.float32), tl.load(ups + at).to(tl.float32)
    value = tl.div_rn(gate, 1.0 + tl.exp(tl.minimum(-gate, 88.0))).to(out.dtype.element_ty)
    tl.store(out + at, (value.to(tl.float32) * up).to(out.dtype.element_ty))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_of_every_gate_is_that_of_a_true_division(device, dtype):
    """Bit for bit, signs of zeros too; but for the gate of minus infinity, whose silu is torch's NaN."""
    gates = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)
    ups = torch.randn(gates.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    wanted = torch.empty_like(gates)
    _silu_by_true_division[(64,)](gates, ups, wanted, block=1024)
    got = activation_of(torch.stack([gates, ups], 1), Activation("silu"), gated=True, interleaved=False)[:, 0]
    plain = ~gates.isnan() & (gates != float("-inf"))
    assert torch.equal(got[plain].view(torch.int16), wanted[plain].view(torch.int16))
    assert bool(got[~plain].isnan().all())
