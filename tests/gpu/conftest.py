"""Tests of kernels and of the device path: on a GPU where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.port_events import wait_value

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def cuda_is_up() -> None:
    """What a driver opens, maps and loads at its first use is nobody's leak, and must not wait behind closed gates."""
    if not ON_GPU:
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
    word = torch.ones(1, dtype=torch.int32, pin_memory=True)
    assert wait_value()(stream.cuda_stream, word.data_ptr(), 1, 0) == 0
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()
    torch.cuda.synchronize()


if ON_GPU:

    @pytest.fixture(autouse=True)
    def nothing_left() -> None:
        """Instead of the checks of the folder above: the driver opens files whenever it likes, and Triton compiles,
        which blocks, where a kernel is first used. Without a GPU both hold; suites count their own fds in any case."""
        return
