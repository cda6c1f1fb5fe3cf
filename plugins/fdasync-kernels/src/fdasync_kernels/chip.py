"""What a device can do that kernels are cut by: asked of the driver once, since it never changes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_AMD = bool(vars(torch.version).get("hip"))


class Chip(NamedTuple):
    """A device.

    Attributes:
        capability: of CUDA; (0, 0) for other makers' devices.
    """

    capability: tuple[int, int]

    @property
    def large(self) -> bool:
        """Whether a program may take 227 KB of shared memory, and the bulk copy engine fills it: Hopper, and the
        Blackwell of data centres. Others have 99 or 163 KB."""
        return self.capability[0] in (9, 10)

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may be launched while the one before it runs."""
        return self.capability >= (9, 0)


def runs_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of a device: on CUDA, and anywhere under Triton's interpreter."""
    return device.type == "cuda" or _INTERPRETED


def chip_of(device: torch.device) -> Chip:
    """The abilities of a CUDA device; a CPU, where Triton's interpreter runs kernels, has all but the overlap."""
    if device.type != "cuda":
        return Chip((9, 0))
    return _asked(device.index or 0)


# no state: the answer is a property of the machine
@cache
def processors_of(device: torch.device) -> int:
    """How many programs run at once, one on each: of a CUDA device. The interpreter's programs take turns: some, so
    that there is more than one."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


# no state: the answer is a property of the machine
@cache
def _asked(index: int) -> Chip:
    # AMD's devices call themselves CUDA devices too, and count capabilities of their own
    return Chip((0, 0)) if _AMD else Chip(torch.cuda.get_device_capability(index))
