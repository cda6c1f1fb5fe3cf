"""What holds for every test here is what holds for those of the core."""

from __future__ import annotations

from tests.support.every_test import no_tasks_left, nothing_left, pytest_asyncio_loop_factories

__all__ = ["no_tasks_left", "nothing_left", "pytest_asyncio_loop_factories"]
