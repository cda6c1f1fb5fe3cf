"""Operations and their kernels: which kernel computes an operation on the chip at hand.

An operation is a function of tensors, and its own code is a kernel that runs on every chip. A family of chips may have
another kernel for it, in a module beside the operation's. The module is named after both (`prefill.py`,
`prefill_hopper.py`) and lists the kernel in `KERNELS`. This kernel computes the calls that it fits, and the operation's
own code computes all others. So a kernel is added in one file: `tests/test_numerics.py` finds it there and holds it
against the operation's reference.

Knows no shapes and no models. Modules of operations use it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from fdasync_kernels.chip import chip_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

P = ParamSpec("P")
R = TypeVar("R")

# by the first number of CUDA's capability: what modules of kernels may be named after
FAMILIES = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell_small"}


@dataclass(frozen=True)
class Kernel(Generic[P, R]):
    """A kernel of one family of chips.

    Attributes:
        fits: whether it computes a call, by shapes, strides, dtypes and options; asked on any chip, and never waits.
        run: computes a call that fits. The operation's docstring says what it reads, writes and raises, and which bits
            depend on what: calls that do not fit go to the operation's own code.
        interpreted: Triton's interpreter runs it too, so that tests without the chip play it.
    """

    fits: Callable[Concatenate[torch.Tensor, P], bool]
    run: Callable[Concatenate[torch.Tensor, P], R]
    interpreted: bool = True


class Operation(Generic[P, R]):
    """A function whose calls go to the kernel of the chip where that fits, else to `own`.

    The first argument, given by place, is on the device that computes. A module has an `Operation` by `@operation`.
    """

    def __init__(self, own: Callable[Concatenate[torch.Tensor, P], R]) -> None:
        update_wrapper(self, own)
        self.name = own.__name__
        self.own = own

    def __call__(self, first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel = self.kernel_of(family_of(first.device))
        if kernel is not None and kernel.fits(first, *args, **kwargs):
            return kernel.run(first, *args, **kwargs)
        return self.own(first, *args, **kwargs)

    def kernel_of(self, family: str) -> Kernel[P, R] | None:
        """The kernel that a family of chips has for this operation, or None."""
        found: Kernel[P, R] | None = _kernels_of(self.own.__module__, family).get(self.name)
        return found


def operation(own: Callable[Concatenate[torch.Tensor, P], R]) -> Operation[P, R]:
    """The operation that a function is, for a decorator."""
    return Operation(own)


def family_of(device: torch.device) -> str:
    """The family of a device's chip; "" where none is known, and on a CPU."""
    return FAMILIES.get(chip_of(device).capability[0], "") if device.type == "cuda" else ""


# no state: what stands beside a module never changes
@cache
def _kernels_of(module: str, family: str) -> dict[str, Kernel[Any, Any]]:
    beside = f"{module}_{family}"
    if not family or importlib.util.find_spec(beside) is None:
        return {}
    kernels: dict[str, Kernel[Any, Any]] = importlib.import_module(beside).KERNELS
    return kernels
