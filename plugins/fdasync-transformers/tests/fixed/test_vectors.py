"""Under fixed numerics no function of elements or rows has bits that depend on the place."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from fdasync_transformers.fixed.mode import FixedNumerics
from torch.nn import functional

from fdasync.errors import RunnerError

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


@pytest.mark.ci(after=10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(FUNCTIONS, key=lambda name: name.endswith("_")))
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


def pointwise():
    """All of torch's operations of elements, in each form."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            if torch.Tag.pointwise in func.tags or name in ("gelu_", "hardswish", "polar", "silu_", "hardswish_"):
                yield func


def arguments(func, dtype):
    """Tensors of random numbers, and numbers; None: it takes others."""
    found, named = [], {}
    for one in func._schema.arguments:
        kind = str(one.type)
        if one.is_out:
            named[one.name] = None
        elif kind == "Tensor":
            found.append((torch.randn(1000) * 2).to(dtype))
        elif one.name == "alpha":
            named["alpha"] = 0.7
        elif one.has_default_value():
            continue
        elif kind in ("number", "float"):
            found.append(0.7)
        else:
            return None
    return found, named


def computed(func, given, named, change):
    args = [change(one.clone()) if isinstance(one, torch.Tensor) else one for one in given]
    dtype = args[-1].dtype if isinstance(args[-1], torch.Tensor) else torch.float32
    named = {name: torch.empty(0, dtype=dtype) if value is None else value for name, value in named.items()}
    with FixedNumerics():
        return func(*args, **named)


def strided(x):
    wide = x.new_zeros(len(x), 2)
    wide[:, 0] = x
    return wide[:, 0]


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_operation_of_elements_looks_at_places_or_strides(dtype):
    torch.manual_seed(0)
    seen, differing = set(), set()
    for func in pointwise():
        taken = arguments(func, dtype)
        # not every one takes every dtype, nor numbers of both signs
        with contextlib.suppress(RuntimeError, IndexError, RunnerError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if taken is None:
                continue
            whole = computed(func, *taken, lambda x: x)
            if not isinstance(whole, torch.Tensor) or not whole.is_floating_point():
                continue
            parts = [computed(func, *taken, lambda x, n=n: x[5 : 5 + n].clone()) for n in (1, 9, 100)]
            parts.append(computed(func, *taken, lambda x: strided(x)[5:900]))
            seen.add(str(func))
            wanted = whole[5:].double().nan_to_num(7.0)
            if any(not torch.equal(part.double().nan_to_num(7.0), wanted[: len(part)]) for part in parts):
                differing.add(str(func))
    assert len(seen) > 200
    assert {"aten.silu_.default", "aten.pow.Scalar_out", "aten.mish.default", "aten.add.Tensor"} <= seen
    assert not differing


def test_forms_that_write_do_what_torchs_do():
    x = torch.randn(5, 7)
    with FixedNumerics():
        into, view = torch.empty(0), torch.zeros(7, 10)
        assert torch.sigmoid(x, out=into) is into
        assert torch.equal(into, torch.sigmoid(x))
        torch.sigmoid(x, out=view[:, ::2].t())
        assert torch.equal(view[:, ::2].t(), into)
        turned = x.t().contiguous().t()
        assert turned.sigmoid_() is turned
        assert torch.equal(turned, into)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(3, dtype=torch.int64).sigmoid_()
        assert torch.exp(torch.zeros((), dtype=torch.int64)).shape == ()
        assert torch.pow(x.bfloat16(), torch.tensor(1.5)).dtype is torch.bfloat16
        assert torch.pow(x.abs()[:, None], x[None]).shape == (5, 5, 7)
        with pytest.raises(RunnerError, match="depend on the batch"):
            torch.lerp(x * 1j, x * 1j, x * 1j)
