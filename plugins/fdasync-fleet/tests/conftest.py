"""What holds for every test here is what holds for those of the core."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.every_test import (
    no_tasks_left,
    nothing_left,
    pytest_asyncio_loop_factories,
    pytest_collection_modifyitems,
)

__all__ = ["no_tasks_left", "nothing_left", "pytest_asyncio_loop_factories", "pytest_collection_modifyitems"]

sys.path.insert(0, str(Path(__file__).parent / "support"))
