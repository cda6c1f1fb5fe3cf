"""What kernels are cut by: `chip.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels import chip
from fdasync_kernels.chip import Chip, chip_of, runs_on
from fdasync_kernels.overlap import overlap


def test_it_says_where_kernels_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_on(device)
    assert runs_on(torch.device("cuda"))
    monkeypatch.setattr(chip, "_INTERPRETED", False)
    assert not runs_on(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "large", "overlaps"),
    [
        ((0, 0), False, False),
        ((8, 0), False, False),
        ((8, 9), False, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
        # the Blackwell of desktops: 99 KB
        ((12, 0), False, True),
    ],
)
def test_what_a_chip_can(capability: tuple[int, int], large: bool, overlaps: bool) -> None:
    assert (Chip(capability).large, Chip(capability).overlaps) == (large, overlaps)


def test_the_interpreter_tries_the_tiles_of_the_largest_and_overlaps_nothing() -> None:
    cpu = torch.device("cpu")
    assert chip_of(cpu).large
    assert overlap(cpu) == {"OVERLAP": False}
