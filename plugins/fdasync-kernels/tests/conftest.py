"""Kernels are tested on a GPU where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import every_test

sys.path.insert(0, str(Path(__file__).parent / "support"))

ON_GPU = torch.cuda.is_available()

pytest_asyncio_loop_factories = every_test.pytest_asyncio_loop_factories
if not ON_GPU:
    # a driver opens files whenever it likes, and Triton compiles, which blocks, where a kernel is first used
    no_tasks_left, nothing_left = every_test.no_tasks_left, every_test.nothing_left


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or numbers that no index may be."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = full(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else -7)

    full, like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: like(*args, **kwargs).fill_(float("nan")))
