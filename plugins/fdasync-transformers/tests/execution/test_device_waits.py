"""The mode in which torch raises where a GPU is waited for: it never outlives the test that asked for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from device_waits import waits_raise

# the whole of torch's own words
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    " (Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:1117.)"
)


class Torch:
    """Sets the mode, and then warns: once, as torch does."""

    def __init__(self, warning: str = "") -> None:
        self.mode = 0
        self.warning = warning

    def get(self) -> int:
        return self.mode

    def set(self, mode: str | int) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
        warning, self.warning = self.warning, ""
        if warning:
            warnings.warn(warning, stacklevel=1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch(PROTOTYPE)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", fake.set)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", fake.get)
    return fake


def test_the_warning_that_it_is_a_prototype_is_no_error(fake: Torch) -> None:
    for _ in range(2):
        with waits_raise():
            assert fake.mode == 2
        assert fake.mode == 0
    assert not fake.warning, "nobody warned"


def test_the_mode_of_before_comes_back(fake: Torch) -> None:
    fake.mode = 1
    with waits_raise():
        pass
    assert fake.mode == 1


def test_what_raises_within_leaves_the_mode_as_it_was(fake: Torch) -> None:
    with pytest.raises(RuntimeError, match="called a synchronizing"), waits_raise():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert fake.mode == 0


def test_any_other_warning_is_an_error_and_leaves_the_mode_as_it_was(fake: Torch) -> None:
    fake.warning = "something else"
    with pytest.raises(UserWarning, match="something else"), waits_raise():
        pytest.fail("it went on")
    assert fake.mode == 0


def test_warnings_within_are_errors_as_everywhere(fake: Torch) -> None:
    with pytest.raises(UserWarning, match="prototype"), waits_raise():
        warnings.warn(PROTOTYPE, stacklevel=1)
    assert fake.mode == 0
