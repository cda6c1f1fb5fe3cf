"""Tests here run on the loops of the core's tests, and nothing blocks a loop.

Leaks are not looked for: a pool of threads of a library outlives the test that fills it.
"""

from __future__ import annotations

import pytest

from tests.support.every_test import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.fixture(autouse=True)
def nothing_left(no_blocking: None) -> None:
    """Blocking calls fail the test that made them."""
