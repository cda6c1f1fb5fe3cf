"""Under fixed numerics no function of elements or rows has bits that depend on the place."""

from __future__ import annotations

import pytest
import torch
from fdasync_transformers.fixed.mode import FixedNumerics
from torch.nn import functional

FUNCTIONS = {
    "silu": functional.silu,
    "silu_": lambda x: functional.silu(x.clone(), inplace=True),
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "logsigmoid": functional.logsigmoid,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "exp2_": lambda x: x.clone().exp2_(),
    "rsqrt_": lambda x: (x.abs() + 1e-6).rsqrt_(),
    "gelu_": lambda x: torch.ops.aten.gelu_(x.clone(), approximate="tanh"),
    "expm1": torch.expm1,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-6),
    "sqrt": lambda x: x.abs().sqrt(),
    "cos": torch.cos,
    "sin": torch.sin,
    "log1p": lambda x: torch.log1p(x.abs()),
    "log": lambda x: torch.log(x.abs() + 1e-3),
    "square": torch.square,
    "pow": lambda x: x.abs().pow(1.5),
    "reciprocal": lambda x: (x + 100).reciprocal(),
    "relu": functional.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "float32 softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
}
WIDTHS = (64, 96, 100, 8, 37, 1408)
ROWS = 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_rows_alone_and_together(name, dtype):
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    for width in WIDTHS:
        x = (torch.randn(ROWS, width) * 3).to(dtype)
        with FixedNumerics():
            whole = function(x)
            alone = torch.cat([function(row[None]) for row in x])
            sevens = torch.cat([function(some) for some in x.split(7)])
        plain = function(x)
        assert torch.allclose(whole.double(), plain.double(), rtol=1e-2, atol=1e-2)
        assert torch.equal(whole, alone)
        assert torch.equal(whole, sevens)


def test_long_tensors_go_in_parts():
    x = torch.randn(3, 70_001)
    with FixedNumerics():
        assert torch.equal(functional.silu(x)[1:], functional.silu(x[1:]))
        assert functional.silu(x[:0]).shape == (0, 70_001)


def test_threads_change_nothing():
    """Each thread's part of a tensor ends in a tail of its own."""
    x = torch.randn(200_003)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with FixedNumerics():
                found.append(functional.silu(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
