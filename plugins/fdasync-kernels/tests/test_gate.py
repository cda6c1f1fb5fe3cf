"""The kernel of gated dense layers against float64 and against torch's operations: `layer/gate.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdasync_kernels.layer.gate import KINDS, gated
from torch.nn import functional

from fdasync.errors import BadInput

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IN_TORCH: dict[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def pair(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=made) * 4).to(dtype), torch.randn(shape, generator=made).to(dtype)


def test_every_kind_is_tried():
    assert set(IN_TORCH) == set(KINDS)


@pytest.mark.ci(after=18)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", IN_TORCH)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (70, 33), (2, 1100)])
def test_it_gates_as_torch_does(device, dtype, kind, rows, columns):
    gate, up = (each.to(device) for each in pair(dtype, rows, columns))
    ours = gated(gate, up, activation=kind)
    assert ours.dtype is dtype
    exact = IN_TORCH[kind](gate.double()) * up.double()
    # functions that are sums with 1 lose what is below the last place of 1
    slack = float((gate.double() * up.double()).abs().max()) * 3e-7
    torch.testing.assert_close(ours.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=slack)
    library = IN_TORCH[kind](gate) * up
    if kind in ("relu", "relu2"):
        assert torch.equal(ours, library)
    elif dtype is torch.bfloat16:
        # numpy's functions are not torch's, which a narrow dtype seldom shows where no sum with 1 cancels
        assert int((ours != library)[gate > -1.5].sum()) <= ours.numel() // 500


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_the_activation_is_rounded_unless_wide(device, kind):
    gate, up = (each.to(device) for each in pair(torch.bfloat16, 50, 64))
    wide = (IN_TORCH[kind](gate.float()) * up.float()).bfloat16()
    assert int((gated(gate, up, activation=kind, wide=True) != wide).sum()) <= 3
    assert int((gated(gate, up, activation=kind) != wide).sum()) > 100


def test_halves_of_one_tensor_other_strides_and_no_rows(device):
    both = pair(torch.float32, 1, 9, 60)[0].to(device)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(gated(gate, up), gated(gate.contiguous(), up.contiguous()))
    assert torch.equal(gated(gate[:, :1], up[:, :1]), gated(gate, up)[:, :1])
    crossed, other = both.mT[:, :30], both.mT[:, 30:]
    assert torch.equal(gated(crossed, other), gated(crossed.contiguous(), other.contiguous()))
    assert gated(gate[:, :0], up[:, :0]).shape == (1, 0, 30)


def test_gates_beyond_the_exponential(device):
    gate = torch.tensor([[-1e30, -200.0, -89.0, -88.0, 0.0, 88.0, 89.0, 1e30]], device=device)
    up = torch.ones_like(gate)
    for kind in ("silu", "sigmoid"):
        ours = gated(gate, up, activation=kind)
        torch.testing.assert_close(ours, IN_TORCH[kind](gate), rtol=1e-5, atol=1e-37)


def test_bad_input_is_refused(device):
    gate = torch.zeros((2, 8), device=device)
    for field, refused in {
        "activation": lambda: gated(gate, gate, activation="swish"),
        "gate": lambda: gated(gate.double(), gate.double()),
        "up": lambda: gated(gate, gate[:1]),
    }.items():
        with pytest.raises(BadInput) as caught:
            refused()
        assert caught.value.field == field
    with pytest.raises(BadInput):
        gated(gate, gate.half())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in IN_TORCH if kind != "gelu"])
def test_the_bits_are_torchs(device, dtype, kind):
    if dtype is torch.float32:
        spread = torch.exp2(torch.linspace(-40, 40, 1 << 14, device=device))
        gate = torch.randn((8, 1 << 14), device=device) * spread
    else:
        gate = torch.arange(1 << 16, device=device).to(torch.int16).view(dtype)
        gate = gate[gate.isfinite() & (gate.abs() > 1e-18)][None]
    up = (torch.rand(gate.shape, device=device) + 0.5).to(dtype)
    assert torch.equal(gated(gate, up, activation=kind), IN_TORCH[kind](gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_a_row_alone_in_a_batch_and_padded(device, dtype):
    gate, up = (torch.randn((600, 768), device=device).to(dtype) for _ in range(2))
    whole = gated(gate, up)
    for count in (1, 2, 17, 64, 255):
        assert torch.equal(gated(gate[:count], up[:count]), whole[:count])
        filler = torch.full((64, 768), float("nan"), device=device, dtype=dtype)
        padded = gated(torch.cat([gate[:count], filler]), torch.cat([up[:count], filler]))
        assert torch.equal(padded[:count], whole[:count])


@pytest.mark.gpu
def test_one_kernel_for_all_numbers_of_rows_and_a_graph_replays_it(device):
    from fdasync_kernels.layer.gate import _gate_kernel

    gate, up = (torch.randn((64, 768), device=device, dtype=torch.bfloat16) for _ in range(2))
    gated(gate, up)
    kernels = [len(cache[0]) for cache in _gate_kernel.device_caches.values()]
    for rows in (1, 2, 16, 33):
        gated(gate[:rows], up[:rows])
    assert [len(cache[0]) for cache in _gate_kernel.device_caches.values()] == kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gated(gate, up)
    gate.copy_(torch.randn_like(gate))
    graph.replay()
    assert torch.equal(result, gated(gate, up))
