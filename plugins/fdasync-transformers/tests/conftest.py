"""Lets the tests of the plugin import their helpers, which stand in `support/`, and those of replay in a trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / "support"), str(_HERE.parents[1] / "fdasync-trainer/tests/support")]
# a check that fails says what it compared
pytest.register_assert_rewrite("checks", "replay_checks")


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_no_bars() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
