"""Hopper's kernels of attention compile without a GPU, and are what they should be then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fdasync_kernels.attention import prefill_hopper

# dim, reach, part, heads a share
PREFILLS = {"fixed order, two heads a share": (64, 1, 512, 2), "default": (128, 0, 0, 1)}


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[int, ...]]:
    """Of each kernel: bytes of shared memory, asynchronous products, copies by the copy engine, waits for products.

    All by one process, whose imports take longer than they do.
    """
    asked = [("prefill", *numbers) for numbers in PREFILLS.values()] + [("latent", 80, split) for split in (0, 1)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_hopper.py"), *map(named, asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: tuple(map(int, numbers)) for name, *numbers in lines}


def named(what: tuple[object, ...]) -> str:
    return ",".join(map(str, what))


def check(found: tuple[int, ...], copies: int) -> None:
    shared, products, made, waits = found
    assert 80_000 < shared <= 227 << 10
    # the compiler lets no two products be under way where it sees their sums used in between: a wait for each
    assert waits < products / 4
    assert products
    assert made == copies


@pytest.mark.ci
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name: str, compiled: dict[str, tuple[int, ...]]) -> None:
    dim, _, part, _ = PREFILLS[name]
    keys_at_once = 64 if part else prefill_hopper._TILES[dim][0]
    check(compiled[named(("prefill", *PREFILLS[name]))], 2 * keys_at_once // 16 * dim // 64)


@pytest.mark.ci
@pytest.mark.parametrize("split", [0, 1])
def test_latents(split: int, compiled: dict[str, tuple[int, ...]]) -> None:
    check(compiled[named(("latent", 80, split))], 64 // 16 * (512 + 64) // 64)
