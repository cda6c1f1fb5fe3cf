"""Every kernel of every operation, against the operation's reference: a chip's own kernels are found by their names.

An operation's tests stand in the files of `CASES`, and compare its own code with references in torch. Here they are
played once more with each kernel that the operation has for some chip: on that chip, or in Triton's interpreter. Where
neither runs the kernel, they say only whether it fits a call.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fdasync_kernels
import pytest
import torch
from fdasync_kernels.registry import FAMILIES, OPERATIONS, Kernel, Operation, family_of, operation

if TYPE_CHECKING:
    from collections.abc import Iterator

# the files of an operation's tests, those first whose shapes are as models have them
CASES = {
    "attend_prefill": ["attention_wide", "attention", "attention_fixed"],
    "attend_decode": ["attention_wide", "attention", "attention_fixed"],
    "attend_latents": ["attention_wide", "latent", "attention_fixed"],
    "attend_rows": ["decode_rows"],
    "attend_packed": ["attention_fixed"],
    "experts": ["experts", "experts_rounding"],
    "linear": ["linear"],
    "batched": ["linear"],
    "linear_slices": ["linear_slices"],
    "stored_linear": ["linear_stored"],
    "router_logits": ["router_product", "router_order"],
    "route": ["router", "router_rules"],
    "route_in_turn": ["router_in_turn"],
    "norm_unchecked": ["norm"],
    "add_rms_norm": ["norm"],
    "add_norm": ["finish"],
    "norm_rows": ["finish"],
    "finish_experts": ["finish"],
    "prepare_qkv": ["qkv"],
    "rotate_unchecked": ["rotary"],
    "gated_unchecked": ["gate"],
    "row_sum": ["sums"],
    "row_mean": ["sums"],
    "convolve": ["recurrence"],
    "recur": ["recurrence"],
    "norm_gated": ["recurrence"],
    "sample_rows": ["sample"],
    "largest_of_rows": ["largest"],
    "log_masses": ["sample"],
    "logit_gradients": ["sample"],
}
MODULES = [
    importlib.import_module(one.name) for one in pkgutil.walk_packages(fdasync_kernels.__path__, "fdasync_kernels.")
]
KERNELS = [
    (name, family)
    for name, one in OPERATIONS.items()
    for family in FAMILIES.values()
    if one.kernel_of(family) is not None
]


def file_of(case: str) -> Path:
    return Path(__file__).parent / f"test_{case}.py"


def cases_of(name: str, request: pytest.FixtureRequest) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The tests that take a device, and their arguments."""
    for file in map(file_of, CASES[name]):
        for test in pytest.Module.from_parent(request.node.parent.parent, path=file).collect():
            assert isinstance(test, pytest.Function)
            if "device" not in test.fixturenames or (test.get_closest_marker("gpu") and not torch.cuda.is_available()):
                continue
            if any(mark.args[0] for mark in test.iter_markers("skipif")):
                continue
            for fixture in (name for mark in test.iter_markers("usefixtures") for name in mark.args):
                request.getfixturevalue(fixture)
            given = test.callspec.params if hasattr(test, "callspec") else {}
            names = test._fixtureinfo.argnames
            yield test.obj, {one: given[one] if one in given else request.getfixturevalue(one) for one in names}


def test_every_operation_has_cases() -> None:
    assert OPERATIONS.keys() == CASES.keys()
    for name, one in OPERATIONS.items():
        assert any(one.own.__module__ in file_of(case).read_text() for case in CASES[name]), name


def test_every_kernel_that_a_module_lists_is_of_an_operation_beside_it() -> None:
    listed = [(name, module.__name__) for module in MODULES for name in getattr(module, "KERNELS", ())]
    found = [(name, f"{OPERATIONS[name].own.__module__}_{family}") for name, family in KERNELS]
    why = "is the file named after the operation's file and one of FAMILIES, and is the operation in that file?"
    assert sorted(listed) == sorted(found), why


class Fits(Exception):
    """A kernel that does not run here would compute a call."""


# on a GPU these are among its tests
@pytest.mark.parametrize("place", ["anywhere", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("played", ["kernel", "own code"])
@pytest.mark.parametrize(("name", "family"), KERNELS)
def test_a_kernel_fits_some_case_and_computes_what_the_reference_does(
    device: torch.device,
    name: str,
    family: str,
    played: str,
    place: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, fitted = OPERATIONS[name], 0
    kernel = one.kernel_of(family)
    assert kernel is not None
    here = family_of(device) == family or (device.type == "cpu" and kernel.interpreted)
    if played == "own code" and family_of(device) != family:
        pytest.skip("its own code is what all other tests play here")

    def fits(*args: Any, **options: Any) -> bool:
        nonlocal fitted
        fitting = kernel.fits(*args, **options)
        fitted += fitting
        if fitting and not here:
            raise Fits
        return fitting and played == "kernel"

    monkeypatch.setitem(one.kernels, torch.empty(0, device=device).device, Kernel(fits, kernel.run))
    for test, arguments in cases_of(name, request):
        with suppress(pytest.skip.Exception):
            try:
                test(**arguments)
            except Fits:
                return
            except BaseException as error:
                error.add_note(f"{test.__name__}, {arguments}")
                raise
    assert fitted > 0, f"no case of {name} fits {family}'s kernel: write one in a file of CASES"


def test_a_call_goes_to_the_chip_s_kernel_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(x: torch.Tensor, size: int, *, wide: bool = False) -> str:
        return f"own {size} {wide}"

    kernel = Kernel(fits=lambda _x, size, **_options: size > 2, run=lambda _x, size, **_options: f"hopper {size}")
    monkeypatch.setattr(
        "fdasync_kernels.registry._kernels_of", lambda _module, family: {"own": kernel} if family else {}
    )
    monkeypatch.setattr("fdasync_kernels.registry.family_of", lambda device: "hopper" if device.type == "meta" else "")
    one = Operation(own)
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    assert [one(there, 3), one(there, 2, wide=True), one(here, 3)] == ["hopper 3", "own 2 True", "own 3 False"]
    monkeypatch.setattr("fdasync_kernels.registry.OPERATIONS", {})
    assert operation(own) is own, "a function without kernels beside it is called as it is"
