"""Lets the tests import their helpers, which stand in `support/`, and those of the transformers plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / "support"), str(_HERE.parents[1] / "fdasync-transformers/tests/support")]
# a check that fails says what it compared
pytest.register_assert_rewrite("replay_checks")


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_no_bars() -> None:
    # tests of row formats alone need neither
    try:
        import torch
        import transformers
    except ModuleNotFoundError:
        return
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
