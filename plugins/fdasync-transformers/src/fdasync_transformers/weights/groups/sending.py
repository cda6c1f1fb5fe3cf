"""The trainer's side: rank 0 of a group, which tells what it will send, and broadcasts it.

Used by trainers, in their own processes; every call but `tell` blocks. What it sends is what `Runner.receive_tensors`
receives; trainers with groups of their own send without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import torch
import xxhash

from fdasync.errors import BadInput
from fdasync.request import GroupTensors, TensorMeta, WeightsGroup
from fdasync_transformers.weights.deltas.tensors import dtype_name, own_tensors
from fdasync_transformers.weights.groups.framing import buckets
from fdasync_transformers.weights.groups.group import JoinedGroup, new_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fdasync_transformers.weights.groups.framing import Bucket

#: of CPUs: what comes alone is received in place, and longer broadcasts of gloo leave the caches
BUCKET_NBYTES = 1 << 20
#: of GPUs: long against what a broadcast costs, and short against the memory that is left beside a model
GPU_BUCKET_NBYTES = 128 << 20


class WeightsSender:
    """Rank 0 of a group.

        sender = WeightsSender(world_size=2)
        joined = asyncio.to_thread(sender.join)
        await asyncio.gather(joined, engine.join_weights_group(sender.group))
        part = sender.tell(model)
        sent = asyncio.to_thread(sender.send, model)
        await asyncio.gather(sent, engine.update_weights(version, part, mode="keep"))

    Args:
        world_size: the trainer, and each worker process of all engines.
        name: of the group.
        address: of this process, at which the others find the store.
        port: of the store; 0: a free one.
        backend: "gloo", or "nccl" for tensors on GPUs.
        interface: of the network, to listen on; "": the loopback one.
        timeout_s: longest that the ranks may take to meet, and that a broadcast may take.
        bucket_nbytes: see `GroupTensors`; None: as it is fast on this kind of device.
        checksum: send one behind the tensors. Hashing takes about as long as the broadcast between GPUs.

    Attributes:
        group: what the engine is told.
        store: of this rank.

    Raises WeightsRejected where the store cannot listen.
    """

    def __init__(
        self,
        *,
        world_size: int,
        name: str = "weights",
        address: str = "127.0.0.1",
        port: int = 0,
        backend: Literal["gloo", "nccl"] = "gloo",
        interface: str = "",
        timeout_s: float = 60.0,
        bucket_nbytes: int | None = None,
        checksum: bool = False,
    ) -> None:
        if bucket_nbytes is None:
            bucket_nbytes = GPU_BUCKET_NBYTES if backend == "nccl" else BUCKET_NBYTES
        self._bucket_nbytes = bucket_nbytes
        self._checksum = checksum
        self._interface = interface
        try:
            self.store = new_store(address, port, world_size, timeout_s, is_trainer=True)
        except (RuntimeError, ValueError, OSError) as error:
            raise BadInput("port", f"no store can listen at {address}:{port}: {error}") from error
        self.group = WeightsGroup(
            name=name,
            address=address,
            port=int(self.store.port),
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._joined: JoinedGroup | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self) -> None:
        """Meet the other ranks. Blocks, at most `timeout_s`. Raises WeightsRejected."""
        self._joined = JoinedGroup(msgspec.structs.replace(self.group, rank=0), self._interface, self.store)

    def tell(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> GroupTensors:
        """What the engine must be told before `send` of the same tensors. Raises WeightsRejected as `named_tensors`."""
        metas = [
            TensorMeta(name, dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in own_tensors(source)
        ]
        return GroupTensors(
            group=self.group.name, tensors=tuple(metas), bucket_nbytes=self._bucket_nbytes, checksum=self._checksum
        )

    def send(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Broadcast the tensors, which must not change meanwhile. Blocks until they are sent. Raises WeightsBroken
        where a rank left, or took longer than `timeout_s`."""
        group = self._joined
        if group is None:
            raise BadInput("group", f"rank 0 of {self.group.name!r} has not joined", hint="call join() first")
        # read as they are sent: thousands of tensors take as long to look at as their bytes do between GPUs
        tensors: list[torch.Tensor] = []
        made = xxhash.xxh3_128() if self._checksum else None
        for bucket in buckets(_sizes(source, tensors), self._bucket_nbytes):
            if group.is_full:
                group.wait()
            parts = [_on_device(tensors[number], group.device) for number, _ in bucket.parts]
            if made is not None:
                for part in parts:
                    data: Any = _bytes_of(part)[bucket.first : bucket.first + bucket.nbytes].cpu().numpy()
                    made.update(data)
            group.begin(_joined(bucket, parts))
        if made is not None:
            if group.is_full:
                group.wait()
            group.begin(torch.tensor(list(made.digest()), dtype=torch.uint8, device=group.device))
        while group.is_busy:
            group.wait()

    def close(self) -> None:
        """Leave; idempotent. Engines see the end of the connection."""
        if self._joined is not None:
            self._joined.close()
            self._joined = None


def _sizes(source: torch.nn.Module | Mapping[str, torch.Tensor], read: list[torch.Tensor]) -> Iterator[int]:
    """Bytes of each tensor of the source, which is appended to `read` before."""
    for _, tensor in own_tensors(source):
        read.append(tensor)
        yield tensor.nbytes


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor's elements, flat."""
    held = tensor.detach()
    return (held if held.device == device else held.to(device)).reshape(-1)


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _joined(bucket: Bucket, parts: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of a bucket. One tensor alone is not copied."""
    if len(parts) == 1:
        return _bytes_of(parts[0])[bucket.first : bucket.first + bucket.nbytes]
    dtype = parts[0].dtype
    if all(part.dtype == dtype for part in parts) and bucket.nbytes == sum(part.nbytes for part in parts):
        return _bytes_of(torch.cat(parts))
    made = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=parts[0].device)
    data = [_bytes_of(part) for part in parts]
    torch._foreach_copy_([made[at : at + len(one)] for (_, at), one in zip(bucket.parts, data, strict=True)], data)
    return made
