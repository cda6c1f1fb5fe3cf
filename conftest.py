"""What holds for every test of the repository, plugins included: where the GPU's tests run, and kernels without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: an NVIDIA driver is loaded: torch may see a GPU
HAS_DRIVER = Path("/dev/nvidiactl").exists()

if not HAS_DRIVER:
    # kernels run in Triton's interpreter, which must be known before triton is first imported; children inherit it
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _has_gpu() -> bool:
    if not HAS_DRIVER:
        return False
    import torch

    return torch.cuda.is_available()
