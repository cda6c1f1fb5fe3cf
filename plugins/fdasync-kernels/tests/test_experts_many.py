"""The products of experts with many rows, compiled for Hopper without one: `experts/many.py`.

That they are right is in `test_experts.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fdasync_kernels.experts.tiles import choose_tiles


@pytest.mark.ci
def test_they_compile_for_hopper_without_one() -> None:
    """Their products are of the tensor cores' asynchronous kind, nothing is loaded through registers, the ring fits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_experts.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tiles = choose_tiles(8192, 8, 128, torch.bfloat16, large=True, bulk=True)
    up, down = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    # two programs of the first fit a processor, with 1 KiB each of its own; one of the second
    assert 2 * (up[0] + 1024) <= 228 << 10
    assert down[0] <= 227 << 10
    # a step of the loop, of whole tiles and of half ones; a product takes 64 rows, or four warps' share of the columns
    assert up[1] == (2 + 1) * tiles.up.depth // 16
    assert down[1] == tiles.down.depth // 16
    # weights of each step of the ring; the rows of the first product, 16 bytes a thread, and those of the second
    each = tiles.up.stages * tiles.rows * tiles.up.depth * 2 // 16 // (32 * tiles.up.warps)
    assert up[2:] == (2 * tiles.up.stages, each + each // 2)
    assert down[2:] == (2 * tiles.down.stages, 0)
