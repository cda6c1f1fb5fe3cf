"""Where the experts' kernels round, in what order they sum, and what they read: `experts/`.

The inputs are such that every sum is exact in any order of addition but the one that a test is about. So the results
are those of separate operations of torch to the last bit, in Triton's interpreter too.
"""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.experts import chain
from fdasync_kernels.experts.activation import Activation
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.experts.tiles import Tile, Tiles

E, K, H, INNER = 4, 3, 32, 16
# few rows, of which no pair is grouped, and many
ROWS = [2, 12]
SWAPPED = Tiles(16, Tile(32, 32, 4, 2, swap=True), Tile(32, 32, 4, 2, swap=True), chunk=64)
PAIRED = Tiles(8, Tile(16, 32, 4, 2, swap=True, paired=True), Tile(32, 32, 4, 2, swap=True), single=True)
SINGLE = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), single=True)
APART = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), apart=True)
relu = torch.relu


def small(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Whole numbers: products of two and sums of a few of them are exact in float32."""
    return torch.randint(-63, 64, shape, generator=draw).double()


def separate(rows: torch.Tensor, activation: Activation, gated: bool) -> torch.Tensor:
    """The activation of [gate, up] (or of rows without a gate) by torch's operations, each of which rounds."""
    if not gated:
        return relu(rows).square()
    gate, up = rows.chunk(2, dim=-1)
    if activation.kind == "relu2":
        return relu(gate).square() * up
    if activation.form == "wide":
        return (relu(gate.float()) * up.float()).to(rows.dtype)
    if activation.form == "clamped":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return relu(gate) * up


# and whether there is a gate
ACTIVATIONS = [
    (Activation("relu"), True), (Activation("relu", "wide"), True), (Activation("relu2"), True),
    (Activation("relu", "clamped", limit=5.0), True), (Activation("relu2"), False),
]  # fmt: skip


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("activation", "gated"), ACTIVATIONS, ids=str)
@pytest.mark.parametrize("tokens", ROWS)
def test_every_rounding_is_where_separate_operations_round(device, dtype, activation, gated, tokens):
    draw = torch.Generator().manual_seed(tokens)
    # sums have some 13 bits, more than both dtypes, and stay within the range of float16
    hidden, up = small(draw, tokens, H) / 8, small(draw, E, (2 if gated else 1) * INNER, H) / 256
    # two of each output's weights are not 0: there is one addition, and no rounding before the routing weight
    down = torch.zeros((E, H, INNER), dtype=torch.float64)
    column = torch.arange(H) % (INNER // 2)
    down[:, torch.arange(H), column] = 1.0
    down[:, torch.arange(H), INNER - 1 - column] = 1.0
    ids = torch.rand((tokens, E), generator=draw).topk(K).indices
    weights = torch.rand((tokens, K), generator=draw).to(dtype)
    wanted = torch.zeros((tokens, K, H), dtype=dtype)
    for token, slot in torch.cartesian_prod(torch.arange(tokens), torch.arange(K)).tolist():
        expert = int(ids[token, slot])
        held = separate((up[expert] @ hidden[token]).to(dtype), activation, gated)
        sums = (down[expert] @ held.double()).float()
        wanted[token, slot] = (sums * weights[token, slot].float()).to(dtype)
    assert bool(wanted.isfinite().all())
    total = torch.zeros((tokens, H))
    for slot in range(K):
        total += wanted[:, slot].float()
    given = [hidden.to(device, dtype), ids.to(device), weights.to(device), up.to(device, dtype), down.to(device, dtype)]
    parts = experts(*given, activation=activation, gated=gated, parts=True)
    assert torch.equal(parts.cpu(), wanted)
    assert torch.equal(experts(*given, activation=activation, gated=gated).cpu(), total.to(dtype))


def ones(device: torch.device, dtype: torch.dtype, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """The sum over slots, where each expert gives 1 and the routing weights [k] are those given."""
    up = torch.zeros((E, 2 * INNER, H))
    up[:, :, 0] = 1.0
    down = torch.zeros((E, H, INNER))
    down[:, :, 0] = 1.0
    hidden = torch.zeros((tokens, H))
    hidden[:, 0] = 1.0
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(row))[:K] for row in range(tokens)])
    weights = slots.to(device).expand(tokens, K).contiguous()
    given = [hidden.to(device, dtype), ids.to(device), weights, up.to(device, dtype), down.to(device, dtype)]
    return experts(*given, activation=Activation("relu")).cpu()


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize(
    ("slots", "total"),
    [((2.0**26, -(2.0**26), 1.0), 1.0), ((1.0, 2.0**26, -(2.0**26)), 0.0), ((2.0**26, 1.0, -(2.0**26)), 0.0)],
)
def test_slots_are_summed_in_their_order(device, tokens, slots, total):
    found = ones(device, torch.float32, torch.tensor(slots), tokens)
    assert torch.equal(found, torch.full((tokens, H), total))


@pytest.mark.parametrize("tokens", ROWS)
def test_the_sum_of_slots_is_rounded_once(device, tokens):
    """256 + 1 is no bfloat16: a sum that is rounded at every slot stays at 256."""
    found = ones(device, torch.bfloat16, torch.tensor([256.0, 1.0, 1.0]), tokens)
    assert torch.equal(found, torch.full((tokens, H), 258.0, dtype=torch.bfloat16))


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("tiles", [SINGLE, PAIRED, SWAPPED, APART], ids=["single", "paired", "swap", "apart"])
@pytest.mark.parametrize("first", [True, False], ids=["gate and up", "down"])
def test_products_walk_their_inner_dimension_in_order(device, tiles, first):
    """One value that is not 0 in 128 of the inner dimension: whatever the depth of a step, steps are added one by one.
    A quarter of the columns has the right sum 1, of each order of values."""
    big = 2.0**26
    orders = torch.tensor([[big, -big, 1.0], [1.0, big, -big], [big, 1.0, -big], [0.0, 0.0, 0.0]])
    width, inner = (384, 16) if first else (16, 384)
    hidden = torch.zeros((2, width))
    up, down = torch.zeros((1, 2 * inner, width)), torch.zeros((1, width, inner))
    if first:
        hidden[:, ::128] = 1.0
        # gates have the orders, and then ups do; the others are 1
        up[0, :, 0] = 1.0
        up[0, :8, ::128] = orders.repeat(2, 1)
        up[0, inner + 8 :, ::128] = orders.repeat(2, 1)
        down[0, :inner] = torch.eye(inner)
    else:
        hidden[:, 0] = up[0, :, 0] = 1.0
        down[0, :, ::128] = orders.repeat(4, 1)
    given = [each.to(device) for each in (hidden, torch.zeros((2, 1), dtype=torch.int64), torch.ones((2, 1)), up, down)]
    found = experts(*given, activation=Activation("relu"), tiles=tiles).cpu()
    assert torch.equal(found[:, :16], torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(4).expand(2, 16))
    assert not found[:, 16:].any()


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("narrow", [False, True])
def test_padding_rows_and_ids_out_of_range_read_no_expert(device, monkeypatch, tokens, narrow):
    """The experts that only they name hold NaN: nothing of it reaches their parts, which keep what memory held."""
    draw = torch.Generator().manual_seed(tokens)
    up, down = torch.randn((E, 2 * INNER, H), generator=draw), torch.randn((E, H, INNER), generator=draw)
    up[2:], down[2:] = float("nan"), float("nan")
    live = torch.arange(tokens)
    live[1::2] = -1
    ids = torch.tensor([[0, 1, E]] * tokens)
    ids[1::2] = torch.tensor([2, 3, -1])
    if not narrow:
        # of which the low half is an expert
        ids[::2, 2], ids[1::2, 2] = 2**32 + 2, 3 - 2**32
    hidden = torch.randn((tokens, H), generator=draw)
    hidden[1::2] = float("nan")
    weights = torch.rand((tokens, K), generator=draw)
    given = [each.to(device) for each in (hidden, ids.int() if narrow else ids, weights, up, down)]
    mark = 7.0
    with monkeypatch.context() as patch:
        patch.setattr(chain.torch, "empty", lambda *size, **options: torch.zeros(*size, **options) + 7)
        parts = experts(*given, live=live.to(device), parts=True).cpu()
        summed = experts(*given, live=live.to(device)).cpu()
    untouched = torch.full((), mark)
    assert torch.equal(parts[1::2], untouched.expand_as(parts[1::2]))
    assert torch.equal(parts[::2, 2], untouched.expand_as(parts[::2, 2]))
    assert bool((parts[::2, :2] != mark).all())
    assert bool(parts.isfinite().all())
    assert not summed[1::2].any()
    assert torch.equal(summed[::2], parts[::2, 0] + parts[::2, 1])
