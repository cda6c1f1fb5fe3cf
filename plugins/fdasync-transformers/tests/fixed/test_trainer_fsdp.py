"""Fixed numerics over FSDP2's full parameters: a sharded model has the bits of the whole one, and its gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from fsdp_rank import compare

SCRIPT = Path(__file__).parents[1] / "support" / "fsdp_rank.py"


def test_one_rank_has_the_bits_of_the_whole_model() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compare(0, 1, "qwen3_moe", mixed=True, checkpointing=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mixed", "checkpointing"),
    [("qwen3_moe", 0, 0), ("qwen3_moe", 1, 1), ("deepseek_v3", 1, 0), ("gpt_oss", 0, 1)],
)
def test_two_ranks_have_the_bits_of_the_whole_model(
    family: str, mixed: int, checkpointing: int, tmp_path: Path
) -> None:
    ranks = []
    try:
        for rank in range(2):
            parts = [rank, 2, tmp_path / "store", family, mixed, checkpointing]
            command = [sys.executable, str(SCRIPT), *map(str, parts)]
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process in ranks:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
