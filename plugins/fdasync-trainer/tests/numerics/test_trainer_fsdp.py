"""Fixed numerics over FSDP2's full parameters: a sharded model has the bits of the whole one, and its gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rollout_bits
import torch
import torch.distributed as dist
from fdasync_trainer import fixed_numerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fsdp_rank import compare
from rollout_bits import batch_of, drawn, served_in
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fdasync.errors import BadInput

SCRIPT = Path(__file__).parents[1] / "support" / "fsdp_rank.py"


@pytest.mark.ci
def test_one_rank_has_the_bits_of_the_whole_model() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compare(0, 1, "qwen3_moe", mixed=True, checkpointing=True)
    finally:
        dist.destroy_process_group()


def test_parameters_that_stay_in_float32_must_not_be_rounded_with_the_others() -> None:
    whole, *sharded = (make_tiny_model("ernie4_5_moe") for _ in range(3))
    served_in(whole, torch.bfloat16)
    rounding = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    arguments, real = batch_of(drawn((9, 4)), "left")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for model, alone in zip(sharded, (False, True), strict=True):
            for module in model.modules():
                if alone and type(module).__name__.endswith("Router"):
                    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
            fully_shard(model, mesh=mesh, mp_policy=rounding)
        with fixed_numerics(sharded[0]), pytest.raises(BadInput, match=r"gate\.weight is torch\.bfloat16 in this pass"):
            sharded[0](**arguments)
        found = []
        for model in (whole, sharded[1]):
            with fixed_numerics(model), torch.no_grad():
                found.append(model(**arguments).logits.flatten(0, 1)[real])
        assert torch.equal(*found)
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "mixed", "checkpointing"),
    [("qwen3_moe", 0, 0), ("qwen3_moe", 1, 1), ("deepseek_v3", 1, 0), ("gpt_oss", 0, 1)],
)
def test_two_ranks_have_the_bits_of_the_whole_model(
    family: str, mixed: int, checkpointing: int, tmp_path: Path
) -> None:
    ranks = []
    # a helper of the transformers plugin's tests
    environment = {**os.environ, "PYTHONPATH": str(Path(rollout_bits.__file__).parent)}
    try:
        for rank in range(2):
            parts = [rank, 2, tmp_path / "store", family, mixed, checkpointing]
            command = [sys.executable, str(SCRIPT), *map(str, parts)]
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        for process in ranks:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
