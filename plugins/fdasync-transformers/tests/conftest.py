"""Lets the tests of the plugin import their helpers, which stand in `support/`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_no_bars() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
