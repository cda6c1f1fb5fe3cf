"""Receives the tensors of an update in place, in the broadcasts of a trainer's group.

A tensor that comes alone, is whole here and has the model's dtype is received into the parameter itself; others come
into a buffer and are put to their places while the next ones come. What goes where is planned once for updates of the
same tensors: between GPUs a bucket takes less time than planning it. Bytes are hashed on the way where the sender
offers a checksum. Called by `joined.py`; `weights/update.py` says which tensors come, and their places.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from fdasync.errors import FdasyncError, WeightsBroken
from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.weights.groups.framing import CHECKSUM_NBYTES, Bucket, buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.weights.groups.group import JoinedGroup
    from fdasync_transformers.weights.kept.targets import Place

# hashed at a time
_HASHED_NBYTES = 64 << 20


class Incoming(NamedTuple):
    """A tensor of the update under way.

    Attributes:
        name, dtype: as its sender has it.
        nbytes: of all of it.
        target: its place; None where the library leaves the tensor out.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    target: Place | None


class _Planned(NamedTuple):
    """One broadcast and where it goes.

    Attributes:
        bucket: the broadcast.
        place: the bytes of the parameter itself; None: a buffer is needed.
        flat: of each tensor the parameter, flat, where all lie close in the buffer, have one dtype, are whole here and
            in one piece; None: they are put one by one.
        counts: elements of each of `flat`.
        dtype: of the tensors as they come, where there is `flat`.
    """

    bucket: Bucket
    place: torch.Tensor | None
    flat: tuple[torch.Tensor, ...] | None
    counts: tuple[int, ...]
    dtype: torch.dtype


class ReceivePlan:
    """Where the tensors of an update go.

    Args:
        incoming: with their places, in the order in which they come.
        bucket_nbytes: as in `GroupTensors`.
        device: on which they come.
    """

    def __init__(self, incoming: Sequence[Incoming], bucket_nbytes: int, device: torch.device) -> None:
        self.incoming = tuple(incoming)
        made = buckets((tensor.nbytes for tensor in incoming), bucket_nbytes)
        self.broadcasts = [self._plan(bucket, device) for bucket in made]

    def _plan(self, bucket: Bucket, device: torch.device) -> _Planned:
        tensors = [self.incoming[number] for number, _ in bucket.parts]
        flat = [_flat(tensor) for tensor in tensors]
        whole = [one for one in flat if one is not None]
        dtype = tensors[0].dtype
        place = None
        if len(tensors) == 1 and whole and whole[0].dtype == dtype and whole[0].device == device and bucket.nbytes:
            place = whole[0].view(torch.uint8)[bucket.first : bucket.first + bucket.nbytes]
        ends = 0
        is_close = bucket.whole and len(whole) == len(tensors)
        for (_, at), tensor in zip(bucket.parts, tensors, strict=True):
            # torch copies no lists of FP8
            is_close = is_close and at == ends and tensor.dtype == dtype and dtype.itemsize > 1
            ends = at + tensor.nbytes
        counts = tuple(tensor.nbytes // dtype.itemsize for tensor in tensors)
        return _Planned(bucket, place, tuple(whole) if is_close else None, counts, dtype)


def _flat(tensor: Incoming) -> torch.Tensor | None:
    """The elements of a tensor's place, where this process has all of it in one piece."""
    target = tensor.target
    if not isinstance(target, Target) or target.cut is not None or not target.tensor.is_contiguous():
        return None
    return target.tensor.detach().view(-1)


class TensorReceiver:
    """The tensors of one call of `Runner.receive_tensors`.

    Args:
        group: its rank 0 sends.
        plan: of these tensors.
        checksum: as in `GroupTensors`.
    """

    def __init__(self, group: JoinedGroup, plan: ReceivePlan, *, checksum: bool) -> None:
        self._group = group
        self._plan = plan
        self._hash = xxhash.xxh3_128() if checksum else None
        # that no broadcast under way has
        self._free: list[torch.Tensor] = []
        self._coming: list[tuple[_Planned, torch.Tensor | None]] = []
        self._taken = 0

    async def run(self, until: float) -> None:
        """Receive all, at most until that time of the loop. Raises WeightsBroken; then some tensors may be torn."""
        for planned in self._plan.broadcasts:
            while self._group.is_full:
                await self._take(until)
            self._begin(planned, until)
        while self._coming:
            await self._take(until)
        if self._hash is not None:
            buffer = torch.empty(CHECKSUM_NBYTES, dtype=torch.uint8, device=self._group.device)
            self._group.begin(buffer, until - asyncio.get_running_loop().time())
            checksum = await self._group.next(until, "behind the tensors of this update, the checksum,")
            # blocking: some bytes that have come, and nothing is queued behind them
            sent = bytes(checksum.tolist())
            if sent != self._hash.digest():
                raise WeightsBroken(
                    f"the tensors that came have the checksum {self._hash.hexdigest()}, the sender's is {sent.hex()}"
                )

    def _begin(self, planned: _Planned, until: float) -> None:
        data, buffer = planned.place, None
        if data is None:
            nbytes = planned.bucket.nbytes
            buffer = self._free.pop() if self._free else None
            if buffer is None or len(buffer) < nbytes:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
            data = buffer[:nbytes]
        self._group.begin(data, until - asyncio.get_running_loop().time())
        self._coming.append((planned, buffer))

    async def _take(self, until: float) -> None:
        total = len(self._plan.broadcasts)
        what = f"behind {self._taken} of {total} broadcasts of this update" if self._taken else "of this update"
        data = await self._group.next(until, what)
        planned, buffer = self._coming.pop(0)
        self._taken += 1
        if (hashed := self._hash) is not None:
            for number, at in planned.bucket.parts:
                piece = data[at : at + self._plan.incoming[number].nbytes]
                for first in range(0, len(piece), _HASHED_NBYTES):
                    own: Any = piece[first : first + _HASHED_NBYTES].cpu().numpy()
                    hashed.update(own)
        if buffer is not None:
            self._put(planned, data)
            self._free.append(buffer)
        # other calls of the worker come between
        await asyncio.sleep(0)

    def _put(self, planned: _Planned, data: torch.Tensor) -> None:
        """Copy the tensors of a buffer to their places."""
        if planned.flat is not None:
            # one launch for all of them, where the device has launches
            torch._foreach_copy_(planned.flat, data.view(planned.dtype).split_with_sizes(planned.counts))
            return
        for number, at in planned.bucket.parts:
            tensor = self._plan.incoming[number]
            if tensor.target is None or not tensor.nbytes:
                continue
            try:
                values = data[at : at + tensor.nbytes].view(tensor.dtype)
                tensor.target.put_flat(planned.bucket.first // tensor.dtype.itemsize, values)
            except (RuntimeError, ValueError, FdasyncError) as error:
                raise WeightsBroken(f"{tensor.name}: {error}") from error
