"""Lets a kernel be launched while the one before it still runs (programmatic dependent launch, from Hopper on).

A kernel that calls `wait_for_inputs(OVERLAP)` and is launched with `**overlap(device)` comes to the device as soon as
every program of the kernel before it has begun, and waits there for its end: the way of a launch is hidden, which is
worth most where kernels are short. A kernel whose programs need the room themselves says LATE, and calls
`let_next_come` near its end; a program that returns earlier lets the next kernel come too. Behind `wait_for_inputs`
everything is ordered as usual; before it a kernel may read the model's weights, and nothing that a kernel wrote. Every
program of a kernel must call it, even if it then does nothing, or the end of that kernel would not mean the end of all
before it. A graph keeps the order as it was captured. Used by the kernels of a decode step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fdasync_kernels.chip import chip_of

if TYPE_CHECKING:
    import torch


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr, LATE: tl.constexpr = False):
    """Let the next kernel come, and wait for the end of all before this one. LATE: the caller lets it come."""
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_come(OVERLAP: tl.constexpr):
    """Let the next kernel come, where its programs would have taken room from this one's before."""
    if OVERLAP:
        gdc_launch_dependents()


def overlap(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch on this device: whether kernels may overlap there."""
    if device.type == "cuda" and chip_of(device).overlaps:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
