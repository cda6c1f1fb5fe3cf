"""Paths that something was imported by before it moved say where it is now."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("fdasync.gpu.kernels", "fdasync_kernels"),
        ("fdasync.gpu.kernels.layer.norm", "fdasync_kernels"),
        ("fdasync.pd", "fdasync_fleet"),
        ("fdasync.routing", "fdasync_trainer.rows"),
        ("fdasync.pd.router.router", "fdasync_fleet"),
    ],
)
def test_an_old_path_names_the_new_one(before: str, now: str) -> None:
    distribution = now.partition(".")[0].replace("_", "-")
    with pytest.raises(ImportError, match=f"{now}: in a checkout, pip install ./plugins/{distribution}"):
        importlib.import_module(before)
