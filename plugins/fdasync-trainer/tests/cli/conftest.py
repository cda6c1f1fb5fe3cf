"""Tests here run on the loops of the core's tests. Leaks are not looked for: a library's pool of threads outlives the
test that fills it."""

from __future__ import annotations

from tests.support.every_test import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
