"""Operations and their kernels: which kernel computes an operation on the chip at hand.

An operation is a function of tensors, and its own code is a kernel that runs on every chip. A family of chips may have
another kernel for it, in a module beside the operation's. The module is named after both (`prefill.py`,
`prefill_hopper.py`) and lists the kernel in `KERNELS`. This kernel computes the calls that it fits, and the operation's
own code computes all others. So a kernel is added in one file: `tests/test_numerics.py` finds it there and plays
the operation's tests with it.

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
# by name, of the modules that were imported
OPERATIONS: dict[str, Operation[Any, Any]] = {}


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

    The first argument, given by place, is on the device that computes. `@operation` makes it.

    Attributes:
        kernels: of each device that was called for, found at the first call: its chip's kernel, or None.
    """

    def __init__(self, own: Callable[Concatenate[torch.Tensor, P], R]) -> None:
        update_wrapper(self, own)
        self.name = own.__name__
        self.own = own
        self.kernels: dict[torch.device, Kernel[P, R] | None] = {}

    def __call__(self, first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = first.device
        try:
            kernel = self.kernels[device]
        except KeyError:
            kernel = self.kernels[device] = self.kernel_of(family_of(device))
        if kernel is not None and kernel.fits(first, *args, **kwargs):
            return kernel.run(first, *args, **kwargs)
        return self.own(first, *args, **kwargs)

    def kernel_of(self, family: str) -> Kernel[P, R] | None:
        """The kernel that a family of chips has for this operation, or None."""
        found: Kernel[P, R] | None = _kernels_of(self.own.__module__, family).get(self.name)
        return found


def operation(own: Callable[Concatenate[torch.Tensor, P], R]) -> Callable[Concatenate[torch.Tensor, P], R]:
    """The operation that a function is, for a decorator.

    The function itself where no family has a kernel beside it: then a call costs nothing more.
    """
    one = OPERATIONS[own.__name__] = Operation(own)
    return one if any(_beside(own.__module__, family) for family in FAMILIES.values()) else own


def family_of(device: torch.device) -> str:
    """The family of a device's chip; "" where none is known, and on a CPU."""
    return FAMILIES.get(chip_of(device).capability[0], "") if device.type == "cuda" else ""


def _beside(module: str, family: str) -> str | None:
    """The name of a family's module beside one."""
    name = f"{module}_{family}"
    return name if family and importlib.util.find_spec(name) is not None else None


# no state: what stands beside a module never changes
@cache
def _kernels_of(module: str, family: str) -> dict[str, Kernel[Any, Any]]:
    name = _beside(module, family)
    return {} if name is None else importlib.import_module(name).KERNELS
