"""Hopper's kernel of latents compiles without a GPU, as a whole and split, and is what it should be then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fdasync.gpu.kernels.attention.latent import HOPPER


@pytest.mark.parametrize("way", ["whole", "split"])
def test_latents(way: str) -> None:
    """Its products are of the tensor cores' asynchronous kind, rows are copied 16 bytes at a time, and all fits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.kernels._compile_latents", "80", way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products, copies = map(int, done.stdout.split())
    assert 80_000 < shared <= 227 << 10
    assert products > 0
    # of 64 positions, each 512 elements of the latent and 64 that are turned; in front of the loop and in it
    assert copies == 2 * 64 * (512 + 64) // 8 // (32 * HOPPER.warps)
