"""Switches the library's progress bars off: a library must not write to the terminal, and they start a thread."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch the library's progress bars off for the block, in the whole process."""
    logging: Any = import_module("transformers.utils.logging")
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
