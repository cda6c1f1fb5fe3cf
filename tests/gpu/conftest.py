"""Tests of kernels and of the device path: on a GPU where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
