"""The other processes of `weights`: a trainer, and a receiver of raw broadcasts, in which these functions are called.

The trainer has tensors of the checkpoint's names and shapes. It is rank 0 of two groups: that of the engine, and one of
its own with the receiver, over which the same number of bytes goes from one long buffer to another. All calls block.
Knows no figures.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import torch
from fdasync_transformers import WeightsSender
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.groups.group import JoinedGroup
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import GroupTensors, WeightsGroup

# of one raw broadcast, by kind of device: gloo is fastest with short ones
_PIECE_NBYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
# a GPU that holds a model has room for so much more: the buffer is sent again and again there
_MOST_NBYTES = {"cpu": 1 << 62, "cuda": 1 << 30}
_TIMEOUT_S = 120.0
# what this process has, by name
_held: dict[str, Any] = {}


class Told(NamedTuple):
    """What a trainer says: its groups, what the engine must be told of an update, and how many bytes one has."""

    engine: WeightsGroup
    raw: WeightsGroup
    part: GroupTensors
    nbytes: int


def start_trainer(folder: Path, device: str) -> Told:
    """Draw the folder's tensors in bfloat16, and open the stores of both groups."""
    _begin(device)
    model = loading.build(loading.read_checkpoint(str(folder), with_tensors=False), "bfloat16")
    shapes = revert_weight_conversion(model, dict(model.state_dict()))
    tensors = {name: torch.full_like(one, 0.01, device=device) for name, one in shapes.items()}
    backend: Literal["gloo", "nccl"] = "gloo" if device == "cpu" else "nccl"
    engine, raw = (
        WeightsSender(world_size=2, name=name, backend=backend, timeout_s=_TIMEOUT_S) for name in ("engine", "raw")
    )
    _held.update(tensors=tensors, engine=engine, store=raw.store)
    return Told(engine.group, raw.group, engine.tell(tensors), sum(one.nbytes for one in tensors.values()))


def start_receiver(device: str) -> None:
    _begin(device)
    _held["store"] = None


def _begin(device: str) -> None:
    os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)


def join_engine() -> None:
    _held["engine"].join()


def join_raw(group: WeightsGroup, rank: int, nbytes: int) -> None:
    raw = JoinedGroup(msgspec.structs.replace(group, rank=rank), "", _held["store"])
    buffer = torch.ones(min(nbytes, _MOST_NBYTES[raw.device.type]), dtype=torch.uint8, device=raw.device)
    _held.update(raw=raw, buffer=buffer)


def broadcast_raw(nbytes: int) -> None:
    """Broadcast so many bytes, in long pieces, from or to the buffer."""
    group, buffer = _held["raw"], _held["buffer"]
    at, left = 0, nbytes
    while left:
        count = min(_PIECE_NBYTES[group.device.type], left, len(buffer) - at)
        if group.is_full:
            group.wait()
        group.begin(buffer[at : at + count])
        left -= count
        at = (at + count) % len(buffer)
    while group.is_busy:
        group.wait()
    _until_idle(group.device)


def send() -> None:
    """An update of the engine."""
    _held["engine"].send(_held["tensors"])
    _until_idle(_held["raw"].device)


def _until_idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
