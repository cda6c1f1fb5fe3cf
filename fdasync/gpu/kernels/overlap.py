"""Lets a kernel be launched while the one before it still runs (programmatic dependent launch, from Hopper on).

A kernel that begins with `wait_for_inputs(OVERLAP)` and is launched with `**overlap(device)` is put on the device as
soon as every program of the kernel before it has begun, and waits there for its end: the way of a launch is hidden,
which is worth most where kernels are short. What stands behind that first line is ordered as ever. Every kernel of a
chain must begin with it, also a program that then does nothing, or the end of a kernel would not mean the end of all
before it. A graph keeps the order as it was captured. Used by the kernels of a decode step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first line of a kernel: let the next one come, and wait for all before."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch on this device: whether kernels may overlap there."""
    return _overlap(device.index or 0) if device.type == "cuda" else {"OVERLAP": False}


@cache
def _overlap(index: int) -> dict[str, Any]:
    can = torch.cuda.get_device_capability(index) >= (9, 0)
    return {"OVERLAP": can, "launch_pdl": can}
