"""Every kernel of every operation, against the operation's reference: a chip's own kernels are found by their names.

A case calls the operation's reference and the function that it is given, with the same inputs. It is played with each
kernel that an operation has for some chip, on that chip or in Triton's interpreter. Where neither runs the kernel, the
case says only whether it would fit.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import attention_layers
import experts_cases
import fdasync_kernels
import latent_layers
import pytest
import torch
from attention_layers import Shape, dense, make_layer, make_query
from attention_reference import assert_close
from fdasync_kernels.registry import FAMILIES, Kernel, Operation, family_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., Any]

BF16 = torch.bfloat16
SMALL = Shape(heads=4, kv_heads=2)
WIDE = Shape(heads=8, kv_heads=2, key_dim=128, value_dim=128, dtype=BF16)
SHORT = WIDE._replace(reach=("window", 20), sinks=True)
# keys of a sequence that several parts of a kernel's grid share
LONG = 700
SMALL_LATENTS = latent_layers.Shape()
WIDE_LATENTS = latent_layers.Shape(heads=40, rank=512, dims=64, dtype=BF16)


def attend_prefill(run: Run, device: torch.device, shape: Shape = SMALL, before: int = 40) -> None:
    starts, counts = [0, before, 3], [20, 1, 9]
    case, sinks = make_layer(shape, [sum(both) for both in zip(starts, counts, strict=True)], device, block_tokens=16)
    query = make_query(shape, sum(counts), device) / shape.key_dim**0.25
    out, row = attention_layers.prefill(shape, case, sinks, query, starts, counts, attend=run), 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = slice(row, row + count)
        assert_close(out[mine], dense(shape, case, sinks, query[mine], number, start), shape.dtype)
        row += count


def attend_decode(run: Run, device: torch.device, shape: Shape = SMALL, longest: int = 50) -> None:
    lengths = [1, 17, longest]
    case, sinks = make_layer(shape, lengths, device, block_tokens=16)
    query = make_query(shape, len(lengths), device) / shape.key_dim**0.25
    out = attention_layers.decode(
        shape, case, sinks, query, case.lanes, torch.tensor(lengths, device=device) - 1, attend=run
    )
    whose = [(number, length - 1) for number, length in enumerate(lengths)]
    assert_close(out, attention_layers.expected(shape, case, sinks, query, whose), shape.dtype)


def attend_latents(
    run: Run, device: torch.device, shape: latent_layers.Shape = SMALL_LATENTS, longest: int = 50
) -> None:
    lengths = [1, 17, longest]
    case = latent_layers.make_latents(shape, lengths, device, block_tokens=16)
    query = latent_layers.make_query(shape, len(lengths), device)
    out = latent_layers.decode(shape, case, query, case.lanes, latent_layers.last(lengths, device), attend=run)
    whose = [(number, length - 1) for number, length in enumerate(lengths)]
    assert_close(out, latent_layers.expected(case, query, whose), shape.dtype)


def experts(run: Run, device: torch.device, tokens: int = 7, dtype: torch.dtype = torch.float32) -> None:
    case = experts_cases.make(device, tokens, dtype, padded=True)
    got = run(case.hidden, case.ids, case.weights, case.up, case.down, **case.options).double().cpu()
    wanted = experts_cases.reference(case).sum(1)
    assert float((got - wanted).norm() / wanted.norm()) < experts_cases.TOLERANCE[dtype]


def linear(run: Run, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """With a bias and without; on a chip a row has the same bits alone, with some others and with all."""
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=draw).to(device, dtype) for shape in ((37, 136), (72, 136), (72,)))
    exact = x.double() @ weight.double().T
    for added, wanted in ((None, exact), (bias, exact + bias.double())):
        found = run(x, weight, added, **options)
        # a float32 sum of 136 products of numbers near 1, rounded once
        limit = 1e-4 + torch.finfo(dtype).eps / 2 * wanted.abs()
        assert bool(((found.double() - wanted).abs() <= limit).all())
        # the interpreter multiplies by NumPy, whose order of sums goes by the number of rows
        for rows in (1, 15, 16, 17) if device.type == "cuda" else ():
            assert torch.equal(run(x[:rows].contiguous(), weight, added, **options), found[:rows])


def linear_into(run: Run, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=draw).to(device, BF16) for shape in ((20, 64), (32, 64)))
    out = torch.full((20, 32), torch.nan, dtype=BF16, device=device)
    assert torch.equal(run(x, weight, out=out), out)
    assert torch.equal(out, run(x, weight))


def router_logits(run: Run, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    linear(run, device, dtype, rounded=True)


CASES: dict[str, list[Callable[[Run, torch.device], None]]] = {
    "attend_prefill": [
        attend_prefill,
        lambda run, device: attend_prefill(run, device, WIDE),
        lambda run, device: attend_prefill(run, device, SHORT),
        lambda run, device: attend_prefill(run, device, WIDE, LONG),
    ],
    "attend_decode": [
        attend_decode,
        lambda run, device: attend_decode(run, device, WIDE),
        lambda run, device: attend_decode(run, device, SHORT),
        lambda run, device: attend_decode(run, device, WIDE, LONG),
    ],
    "attend_latents": [
        attend_latents,
        lambda run, device: attend_latents(run, device, WIDE_LATENTS),
        lambda run, device: attend_latents(run, device, SMALL_LATENTS, LONG),
    ],
    "experts": [experts, lambda run, device: experts(run, device, 40, BF16)],
    "linear": [linear, lambda run, device: linear(run, device, BF16), linear_into],
    "router_logits": [router_logits, lambda run, device: router_logits(run, device, BF16)],
}


def operations() -> Iterator[Operation[Any, Any]]:
    for one in pkgutil.walk_packages(fdasync_kernels.__path__, "fdasync_kernels."):
        module = importlib.import_module(one.name)
        yield from (
            found
            for found in vars(module).values()
            if isinstance(found, Operation) and found.own.__module__ == module.__name__
        )


OPERATIONS = {one.name: one for one in operations()}
KERNELS = [
    (name, family)
    for name, one in OPERATIONS.items()
    for family in FAMILIES.values()
    if one.kernel_of(family) is not None
]


def test_every_operation_has_cases() -> None:
    assert OPERATIONS.keys() == CASES.keys()


def test_every_kernel_that_a_module_lists_is_of_an_operation_beside_it() -> None:
    listed = [
        (name, one.name)
        for one in pkgutil.walk_packages(fdasync_kernels.__path__, "fdasync_kernels.")
        for name in getattr(importlib.import_module(one.name), "KERNELS", ())
    ]
    found = [(name, f"{OPERATIONS[name].own.__module__}_{family}") for name, family in KERNELS]
    why = "is the file named after the operation's file and one of FAMILIES, and is the operation in that file?"
    assert sorted(listed) == sorted(found), why
    assert sorted(KERNELS) == [("attend_latents", "hopper"), ("attend_prefill", "hopper")]


# on a GPU these are among its tests
places = pytest.mark.parametrize("place", ["anywhere", pytest.param("gpu", marks=pytest.mark.gpu)])


@places
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES.items() for case in range(len(cases))]
)
def test_an_operation_computes_what_its_reference_does(device: torch.device, name: str, case: int, place: str) -> None:
    assert place == "anywhere" or device.type == "cuda"
    CASES[name][case](OPERATIONS[name].own, device)


@places
@pytest.mark.parametrize(("name", "family"), KERNELS)
def test_a_kernel_fits_some_case_and_computes_what_the_reference_does(
    device: torch.device, name: str, family: str, place: str
) -> None:
    assert place == "anywhere" or device.type == "cuda"
    one, fitted = OPERATIONS[name], 0
    kernel = one.kernel_of(family)
    assert kernel is not None

    def run(*args: Any, **options: Any) -> Any:
        nonlocal fitted
        if not kernel.fits(*args, **options):
            return one.own(*args, **options)
        fitted += 1
        here = family_of(device) == family or (device.type == "cpu" and kernel.interpreted)
        return (kernel.run if here else one.own)(*args, **options)

    for case in CASES[name]:
        case(run, device)
    assert fitted > 0, f"no case of {name} fits {family}'s kernel: write one above"


def test_a_call_goes_to_the_chip_s_kernel_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def own(x: torch.Tensor, size: int, *, wide: bool = False) -> str:
        return f"own {size} {wide}"

    kernel = Kernel(fits=lambda _x, size, **_options: size > 2, run=lambda _x, size, **_options: f"hopper {size}")
    one = Operation(own)
    monkeypatch.setattr(
        "fdasync_kernels.registry._kernels_of", lambda _module, family: {"own": kernel} if family else {}
    )
    monkeypatch.setattr("fdasync_kernels.registry.family_of", lambda _device: asked.pop())
    asked += ["", "hopper", "hopper"]
    x = torch.zeros(1)
    assert [one(x, 3), one(x, 2, wide=True), one(x, 3)] == ["hopper 3", "own 2 True", "own 3 False"]
