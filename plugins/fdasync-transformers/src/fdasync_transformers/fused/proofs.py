"""Proofs that cannot end a start: what a proof raises is a reason to keep the library's own code.

A proof runs the library's code on made-up rows and compiles kernels for a device that they may not fit. Both may
raise errors of any type, a kernel's that needs more shared memory than the device has among them. Only memory that ran
out says nothing about the code: a start that went on without kernels would be slow for no reason that lasts. Ranks of a
group fuse alike: what one of them keeps, all keep (`Agree`). Used by all that is fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    #: takes one rank's reason not to fuse something, "" where there is none; returns the reason of all ranks
    Agree = Callable[[str], str]

T = TypeVar("T")


def guarded(prove: Callable[[], T], refuse: Callable[[str], T]) -> T:
    """The result of `prove`; of `refuse`, called with the reason, where `prove` raises.

    Raises MemoryError and torch.OutOfMemoryError as they are.
    """
    try:
        return prove()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models, compilers and drivers raise errors of many types
        return refuse(f"it cannot be compared: {type(error).__name__}: {str(error)[:200]}")


def alone(reason: str) -> str:
    """The `Agree` of a process that is no rank of a group."""
    return reason
