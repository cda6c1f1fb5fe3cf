"""Lets the tests of the plugin import their helpers, which stand in `support/`, and run whole models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_no_bars() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="module")
def _plain_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triton's interpreter does not look for overflows of int32 where it runs whole models: it would take half the time
    of a test. Tests of kernels, in the core and of the sampler, have it look."""
    if request.path.parent.name == "sampling":
        yield
        return
    builder = interpreter.interpreter_builder
    before = builder.options
    builder.options = replace(before, sanitize_overflow=False)
    yield
    builder.options = before
