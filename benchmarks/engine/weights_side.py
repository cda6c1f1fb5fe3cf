"""The other processes of `weights`: the trainer, and a receiver of raw broadcasts. One JSON line in, one out.

The trainer has tensors of the checkpoint's names and shapes. It is rank 0 of two groups: that of the engine, and one of
its own with the receiver, over which the same number of bytes goes from one long buffer to another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from fdasync_transformers import WeightsSender
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.groups.group import JoinedGroup
from transformers.core_model_loading import revert_weight_conversion

from fdasync import TensorMeta, WeightsGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

# of one raw broadcast, by kind of device: gloo is fastest with short ones
_PIECE_NBYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
# a GPU that holds a model has room for so much more: the buffer is sent again and again there
_MOST_NBYTES = {"cpu": 1 << 62, "cuda": 1 << 30}
TIMEOUT_S = 120.0


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the folder's model under the names of a checkpoint, in bfloat16, on the meta device."""
    model = loading.build(loading.read_checkpoint(str(folder), with_tensors=False), "bfloat16")
    return dict(revert_weight_conversion(model, dict(model.state_dict())))


def metas_of(tensors: dict[str, torch.Tensor]) -> tuple[TensorMeta, ...]:
    """As an engine is told."""
    return tuple(
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def raw_broadcast(group: JoinedGroup, buffer: torch.Tensor, nbytes: int) -> None:
    """Broadcast so many bytes, in long pieces, from or to the buffer."""
    piece = min(_PIECE_NBYTES[group.device.type], len(buffer))
    at = left = 0
    left = nbytes
    while left:
        count = min(piece, left, len(buffer) - at)
        if group.is_full:
            group.wait()
        group.begin(buffer[at : at + count])
        left -= count
        at = (at + count) % len(buffer)
    while group.is_busy:
        group.wait()


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def lines() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("trainer", "receiver"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("device")
    parser.add_argument("bucket_nbytes", type=int)
    chosen = parser.parse_args()
    os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    torch.set_num_threads(1)
    device = torch.device(chosen.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend: Any = "nccl" if device.type == "cuda" else "gloo"
    shapes = tensors_of(chosen.folder)
    nbytes = sum(tensor.nbytes for tensor in shapes.values())
    buffer = torch.ones(min(nbytes, _MOST_NBYTES[device.type]), dtype=torch.uint8, device=device)
    raw: JoinedGroup | None = None
    sender: WeightsSender | None = None
    tensors: dict[str, torch.Tensor] = {}
    raw_sender: WeightsSender | None = None
    if chosen.role == "trainer":
        tensors = {name: torch.full_like(one, 0.01, device=device) for name, one in shapes.items()}
        sender = WeightsSender(
            world_size=2, name="engine", backend=backend, timeout_s=TIMEOUT_S, bucket_nbytes=chosen.bucket_nbytes
        )
        raw_sender = WeightsSender(world_size=2, name="raw", backend=backend, timeout_s=TIMEOUT_S)
        groups = [msgspec.to_builtins(one.group) for one in (sender, raw_sender)]
        say(engine=groups[0], raw=groups[1], nbytes=nbytes)
    else:
        say(nbytes=nbytes)
    for line in lines():
        began = time.perf_counter()
        if line["do"] == "join":
            assert sender is not None
            sender.join()
        elif line["do"] == "join raw":
            if raw_sender is not None:
                raw = JoinedGroup(msgspec.structs.replace(raw_sender.group, rank=0), "", raw_sender.store)
            else:
                raw = JoinedGroup(msgspec.convert(line["group"], WeightsGroup), "")
        elif line["do"] == "raw":
            assert raw is not None
            raw_broadcast(raw, buffer, nbytes)
        else:
            assert sender is not None
            sender.send(tensors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        say(done=line["do"], seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
