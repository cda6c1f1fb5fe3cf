"""Tests of kernels and of the device path: on a GPU where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


if ON_GPU:

    @pytest.fixture(autouse=True)
    def nothing_left() -> None:
        """Instead of the checks of the folder above: the driver opens files whenever it likes, and Triton compiles,
        which blocks, where a kernel is first used. Without a GPU both hold; suites count their own fds in any case."""
        return
