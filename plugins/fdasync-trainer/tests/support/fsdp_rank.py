"""A rank of FSDP2 over gloo on a CPU: does the sharded model have the bits and gradients of the whole one?

Run as `python fsdp_rank.py RANK RANKS FILE FAMILY MIXED CHECKPOINTED`; `compare` also by tests, in their own process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from fdasync_trainer import fixed_numerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from replay_helpers import checkpointed
from rollout_bits import batch_of, drawn, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LENGTHS = ((40, 11, 3), (20, 9))


def compare(rank: int, ranks: int, family: str, *, mixed: bool, checkpointing: bool) -> None:
    """Assert that logits are equal, and gradients the mean of the ranks'. In an initialised process group."""
    whole, sharded = make_tiny_model(family).train(), make_tiny_model(family).train()
    if mixed:
        for parameter in whole.parameters():  # buffers stay as they are
            parameter.data = parameter.data.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks,))} | ({"mp_policy": policy} if mixed else {})
    for layer in sharded.model.layers:
        fully_shard(layer, **how)
    fully_shard(sharded, **how)
    if checkpointing:
        checkpointed(sharded, use_reentrant=False)
    arguments, real = batch_of(drawn(LENGTHS[rank]), "left")
    weights = torch.randn(sum(LENGTHS[rank]), 1, generator=torch.Generator().manual_seed(rank))
    logits = []
    for model in (whole, sharded):
        with fixed_numerics(model):
            logits.append(model(**arguments).logits.flatten(0, 1)[real])
            loss_of(logits[-1], weights).backward()
    assert torch.equal(*logits)
    for (name, own), part in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        mean = own.grad.float()
        dist.all_reduce(mean)
        mean /= ranks
        found = part.grad.full_tensor()
        assert found.dtype is torch.float32
        assert (found - mean).norm() <= 1e-6 * mean.norm(), name


def main(rank: int, ranks: int, file: str, family: str, mixed: int, checkpointing: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        compare(rank, ranks, family, mixed=bool(mixed), checkpointing=bool(checkpointing))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
