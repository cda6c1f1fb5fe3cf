"""Hopper's kernels of attention compile without a GPU, and are what they should be then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fdasync.gpu.kernels.attention import prefill_hopper


def compiled(*what: object) -> tuple[int, int, int, int]:
    """Bytes of shared memory, asynchronous products, copies by the copy engine, waits for products."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.kernels._compile_hopper", *map(str, what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products, copies, waits = map(int, done.stdout.split())
    assert 80_000 < shared <= 227 << 10
    # the compiler lets no two products be under way where it sees their sums used in between: a wait for each
    assert waits < products / 4
    return shared, products, copies, waits


@pytest.mark.parametrize(
    ("dim", "reach", "part", "per_share"),
    [(64, 1, 512, 2), (128, 0, 0, 1)],
    ids=["fixed order, two heads a share", "default"],
)
def test_prefill(dim: int, reach: int, part: int, per_share: int) -> None:
    keys_at_once = 64 if part else prefill_hopper._TILES[dim][0]
    _, products, copies, _ = compiled("prefill", dim, reach, part, per_share)
    assert products
    assert copies == 2 * keys_at_once // 16 * dim // 64


@pytest.mark.parametrize("split", [0, 1])
def test_latents(split: int) -> None:
    _, products, copies, _ = compiled("latent", 80, split)
    assert products
    assert copies == 64 // 16 * (512 + 64) // 64
