"""A trainer in a process of its own, with torch's own group made as slime's, Miles' and OpenRLHF's trainers make it.

    python group_trainer.py FOLDER WORLD_SIZE [--die-after N]

It writes the port of its store, waits for its ranks, writes "met", waits for a line, and broadcasts the tensors of the
folder's safetensors file, each by itself; after N of them it ends without a word.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=300)
NAME = "slime-pp_0"


def init_group(world_size: int) -> Any:
    """As trainers do beside their default group: no default group is needed, and none is made."""
    torch_dist: Any = dist
    helper: Any = c10d
    store = torch_dist.TCPStore("127.0.0.1", 0, world_size, True, TIMEOUT, False)
    print(store.port, flush=True)
    group, _ = helper._new_process_group_helper(
        world_size, 0, [], "gloo", torch_dist.PrefixStore(NAME, store), group_name=NAME, timeout=TIMEOUT
    )
    helper._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    print("met", flush=True)
    return group


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--die-after", type=int, default=-1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tensors = load_file(chosen.folder / "model.safetensors")
    group = init_group(chosen.world_size)
    for line in sys.stdin:
        # a line names the tensors of one call; "" all of them
        names = line.split() or list(tensors)
        for number, name in enumerate(names):
            if number == chosen.die_after:
                os._exit(1)
            dist.broadcast(tensors[name], 0, group=group)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
