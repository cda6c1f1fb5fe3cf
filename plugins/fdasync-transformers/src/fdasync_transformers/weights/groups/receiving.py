"""Receives the tensors of an update in place, in the broadcasts of a trainer's group.

A tensor that comes alone, is whole here and has the model's dtype is received into the parameter itself; others come
into a buffer and are put to their places while the next ones come. Bytes are hashed on the way where the sender offers
a checksum. Called by `runner.py`; knows the places of tensors by `weights/update.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from fdasync.errors import WeightsBroken
from fdasync_transformers.weights.groups.framing import CHECKSUM_NBYTES, Bucket, buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.weights.groups.group import JoinedGroup
    from fdasync_transformers.weights.update import Incoming

# hashed at a time
_HASHED_NBYTES = 64 << 20


class _Coming(NamedTuple):
    """A broadcast under way; `buffer` is None where its bytes are in their place then."""

    bucket: Bucket
    buffer: torch.Tensor | None


class TensorReceiver:
    """The tensors of one call of `Runner.receive_tensors`.

    Args:
        group: of which rank 0 sends.
        incoming: tensors with their places, in the order in which they come.
        bucket_nbytes, checksum: as in `GroupTensors`.
    """

    def __init__(self, group: JoinedGroup, incoming: Sequence[Incoming], bucket_nbytes: int, *, checksum: bool) -> None:
        self._group = group
        self._incoming = incoming
        self._buckets = buckets([tensor.nbytes for tensor in incoming], bucket_nbytes)
        self._hash = xxhash.xxh3_128() if checksum else None
        # that no broadcast under way has
        self._free: list[torch.Tensor] = []
        self._coming: list[_Coming] = []

    async def run(self, until: float) -> None:
        """Receive all, at most until that time of the loop. Raises WeightsBroken; then some tensors may be torn."""
        for bucket in self._buckets:
            while self._group.is_full:
                await self._take(until)
            self._begin(bucket)
        while self._coming:
            await self._take(until)
        if self._hash is not None:
            self._group.begin(torch.empty(CHECKSUM_NBYTES, dtype=torch.uint8, device=self._group.device))
            sent = bytes((await self._group.next(until)).tolist())
            if sent != self._hash.digest():
                raise WeightsBroken(
                    f"the tensors that came have the checksum {self._hash.hexdigest()}, the sender's is {sent.hex()}"
                )

    def _begin(self, bucket: Bucket) -> None:
        data, buffer = self._own_place(bucket), None
        if data is None:
            buffer = self._free.pop() if self._free else None
            if buffer is None or len(buffer) < bucket.nbytes:
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._group.device)
            data = buffer[: bucket.nbytes]
        self._group.begin(data)
        self._coming.append(_Coming(bucket, buffer))

    def _own_place(self, bucket: Bucket) -> torch.Tensor | None:
        """The bytes of the parameter itself, where a tensor that comes alone may be received there."""
        if len(bucket.parts) > 1 or not bucket.nbytes:
            return None
        tensor = self._incoming[bucket.parts[0][0]]
        target = tensor.target
        if target is None or target.cut is not None:
            return None
        place = target.tensor.detach()
        fits = place.dtype == tensor.dtype and place.is_contiguous() and place.device == self._group.device
        return place.view(-1).view(torch.uint8) if fits else None

    async def _take(self, until: float) -> None:
        data = await self._group.next(until)
        bucket, buffer = self._coming.pop(0)
        # tensors of the same shape here: one launch for all of them, where the device has launches
        places: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        for number, at in bucket.parts:
            tensor = self._incoming[number]
            piece = data[at : at + tensor.nbytes]
            if self._hash is not None:
                self._update_hash(piece)
            target = tensor.target
            if buffer is None or target is None or not tensor.nbytes:
                continue
            values = piece.view(tensor.dtype)
            if target.cut is None:
                places.append(target.tensor.detach())
                pieces.append(values.view(target.shape))
                continue
            try:
                target.put_flat(0, values)
            except (RuntimeError, ValueError) as error:
                raise WeightsBroken(f"{tensor.name}: {error}") from error
        if places:
            torch._foreach_copy_(places, pieces)
        if buffer is not None:
            self._free.append(buffer)
        # other calls of the worker come between
        await asyncio.sleep(0)

    def _update_hash(self, piece: torch.Tensor) -> None:
        assert self._hash is not None
        for first in range(0, len(piece), _HASHED_NBYTES):
            data: Any = piece[first : first + _HASHED_NBYTES].cpu().numpy()
            self._hash.update(data)
