"""Lets a test of a GPU find whatever waits for it: torch raises there."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: how torch's own warning about the mode begins; it comes once in a process, when the mode is set
_PROTOTYPE = "Synchronization debug mode is a prototype"


@contextmanager
def waits_raise() -> Iterator[None]:
    """Within the context an operation that waits for the device raises RuntimeError, as far as torch sees it.

    torch warns that the mode is a prototype, after it was set; that and nothing else is let pass. The mode of before
    comes back whatever raises, setting the mode included.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set("error")
        yield
    finally:
        _set(before)


def _set(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_PROTOTYPE, category=UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
