"""Tests here run on the loops of the core's tests. A library's pool of threads outlives the test that fills it, so leaks
are not looked for."""

from __future__ import annotations

from tests.support.every_test import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
