"""Keeps the library from writing to the terminal: its progress bars, which start a thread, and its warnings.

Called by the modules that build, read and write models.
"""

from __future__ import annotations

import logging as python_logging
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


@contextmanager
def no_warnings() -> Iterator[None]:
    """Keep the library's warnings back for the block, in the whole process.

    They speak of its own forward pass: of attention and kernels that an engine replaces.
    """
    logger = python_logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(python_logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
