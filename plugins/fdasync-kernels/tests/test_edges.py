"""What stands at the edges of the kernels: ids that are none, dtypes that do not fit, NaN."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.experts.activation import Activation, activation_of
from fdasync_kernels.experts.chain import experts, fits_bulk
from fdasync_kernels.layer.finish import add_norm, finish_experts
from fdasync_kernels.layer.qkv import QkvForm, prepare_qkv
from fdasync_kernels.limits import MOST_EXPERTS
from fdasync_kernels.router.in_turn import route_in_turn
from fdasync_kernels.router.route import route
from fdasync_kernels.sampling.edits import _bias_kernel, _stop_kernel
from fdasync_kernels.sampling.mass import unit_of

from fdasync.errors import BadInput

NAN = float("nan")


@pytest.mark.parametrize("tokens", [3, 12])
def test_a_sum_of_parts_is_that_of_the_experts_for_wide_ids_too(device, tokens):
    """2**32 + 1 is no expert: neither by its low half nor where the parts are summed."""
    draw = torch.Generator().manual_seed(0)
    up, down = torch.randn((4, 32, 16), generator=draw).to(device), torch.randn((4, 16, 16), generator=draw).to(device)
    hidden, weights = torch.randn((tokens, 16), generator=draw).to(device), torch.rand((tokens, 3), generator=draw)
    ids = torch.randint(0, 4, (tokens, 3), generator=draw)
    ids[1], ids[2, 1] = torch.tensor([2**32 + 1, 2**31, 1 - 2**32]), 4
    given = [hidden, ids.to(device), weights.to(device), up, down]
    zeros = torch.zeros_like(hidden)
    parts, whole = experts(*given, parts=True), experts(*given)
    summed, _ = finish_experts(parts, given[1], 4, zeros, None)
    assert torch.equal(summed, whole)
    assert not whole[1].any()
    assert whole[2].any()


def test_ids_of_more_experts_than_a_capture_holds_are_refused(device):
    many = torch.zeros((2, 300), device=device)
    byte = torch.zeros((2, 2), dtype=torch.uint8, device=device)
    with pytest.raises(BadInput, match="ids of 300 experts do not fit"):
        route(many, 2, weights_dtype=torch.float32, capture=byte)
    with pytest.raises(BadInput, match="ids of 300 experts do not fit"):
        route_in_turn(many, 2, 0.1, byte)
    route(many[:, :256], 2, weights_dtype=torch.float32, capture=byte)
    most = torch.zeros((1, MOST_EXPERTS), device=device)
    most[0, MOST_EXPERTS - 1] = 1.0
    wide = torch.zeros((1, 2), dtype=torch.int16, device=device)
    route(most, 1, weights_dtype=torch.float32, capture=wide)
    assert int(wide[0, 0]) == MOST_EXPERTS - 1


def test_the_end_of_a_layer_names_what_it_does_not_take(device):
    parts, residual = torch.ones((3, 2, 16), device=device), torch.ones((3, 16), device=device)
    ids = torch.zeros((3, 2), dtype=torch.int64, device=device)
    live = torch.zeros(6, dtype=torch.int64, device=device)
    for wrong in (live[:2], live.int()[:3], live[::2], live[:3].view(3, 1)):
        with pytest.raises(BadInput, match="live"):
            finish_experts(parts, ids, 4, residual, None, live=wrong)
    with pytest.raises(BadInput, match="with ids"):
        finish_experts(parts, ids.float(), 4, residual, None)
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(BadInput, match="is no dtype of rows"):
            add_norm(residual.to(dtype), residual.to(dtype), None)


FORM = QkvForm(heads=2, kv_heads=1, head_dim=8, rotary_dim=8, clip=0.5)


def test_the_preparation_names_what_it_does_not_take(device):
    qkv, pool = torch.ones((2, 32), device=device), torch.zeros((2, 4, 1, 8), device=device)
    angles, slots = torch.ones((2, 8), device=device), torch.arange(4, device=device)
    for wrong in (slots[:2].int(), slots[:1], slots[::2], slots[:2].view(2, 1)):
        with pytest.raises(BadInput, match="slots"):
            prepare_qkv(qkv, angles, angles, pool, pool.clone(), wrong, FORM)
    with pytest.raises(BadInput, match="is no dtype of rows"):
        prepare_qkv(qkv.int(), angles, angles, pool, pool.clone(), slots[:2], FORM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_of_the_queries_keeps_nan(device, dtype):
    qkv = torch.tensor([-2.0, -0.5, -0.25, 0.0, 0.25, 0.5, 2.0, NAN] * 4).to(device, dtype).view(1, 32)
    keys, values = torch.zeros((2, 1, 1, 1, 8), dtype=dtype, device=device)
    cos, sin = torch.ones((1, 4), device=device), torch.zeros((1, 4), device=device)
    query = prepare_qkv(qkv, cos, sin, keys, values, torch.zeros(1, dtype=torch.int64, device=device), FORM)
    wanted = qkv[0, :8].clamp(-0.5, 0.5)
    torch.testing.assert_close(values.view(8), wanted, rtol=0, atol=0, equal_nan=True)
    # an angle of 0 turns nothing, but NaN times 0 reaches the other half of its pair
    for found in (query[0, 0], query[0, 1], keys.view(8)):
        assert found[[3, 7]].isnan().all()
        rest = [0, 1, 2, 4, 5, 6]
        assert torch.equal(found[rest], wanted[rest])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_keep_nan(device, kind, gated):
    rows = torch.tensor([[NAN, 1.0], [-1.0, NAN], [2.0, 3.0], [-2.0, 3.0]], device=device)
    found = activation_of(rows, Activation(kind), gated=gated, interleaved=False)
    wanted = rows.isnan().any(-1, keepdim=True) if gated else rows.isnan()
    assert torch.equal(found.isnan(), wanted)
    if kind.startswith("relu"):
        power = 2 if kind == "relu2" else 1
        clean = [[2.0**power * 3.0], [0.0]] if gated else [[2.0**power, 3.0**power], [0.0, 3.0**power]]
        assert found[2:].tolist() == clean


def test_the_bulk_engine_reads_multiples_of_16_bytes(device):
    def weights(width: int, shift: int = 0) -> torch.Tensor:
        size = 2 * 8 * width
        return torch.zeros(size + 64, dtype=torch.bfloat16, device=device)[shift : shift + size].view(2, 8, width)

    good = weights(16)
    assert good.data_ptr() % 16 == 0
    assert fits_bulk(good, weights(16, 8), False, False)
    assert not fits_bulk(good, weights(13), False, False), "rows of 26 bytes"
    assert not fits_bulk(weights(16, 4), good, False, False), "an address that is a multiple of 8"
    assert not fits_bulk(good, weights(16, 4), False, False)
    assert not fits_bulk(good, good, True, False)
    assert not fits_bulk(good, good, False, True)


@pytest.mark.parametrize("which", ["bias", "stop"])
def test_edits_of_negative_ids_write_nothing(device, which):
    """Whatever lies before a row of a table belongs to another one."""
    width, columns = 64, 2
    # slot, row of the logits, id
    cells = torch.tensor([[1, 0, -1], [1, 0, -40], [1, 0, 5], [1, 0, 64]], device=device)
    bits = torch.zeros((2, columns), dtype=torch.int32, device=device)
    values = torch.full((2, width), 7.0, device=device)
    if which == "stop":
        _stop_kernel[(1,)](cells, 4, bits, columns, width, cells=16)
    else:
        logits, bias = torch.zeros((1, width), device=device), torch.ones(4, device=device)
        _bias_kernel[(1,)](cells, bias, 4, logits, width, values, bits, columns, width, cells=16)
    assert bits.tolist() == [[0, 0], [1 << 5, 0]]
    wanted = torch.full((2, width), 7.0)
    if which == "bias":
        wanted[1, 5] = 1.0
    assert torch.equal(values.cpu(), wanted)


def test_masses_of_a_row_fit_their_integers() -> None:
    for width in (1, 2, 1000, 1 << 17, 1 << 20, (1 << 20) - 1):
        unit = unit_of(width)
        assert unit == int(unit) <= 2**53
        assert int(unit) * width < 2**63
    assert unit_of(1 << 20) == 2.0**41
