"""Tensors from the engine's memory into workers: chunks of shared memory, used in turn (docs/design.md, rule 11).

While the workers copy the pieces out of one chunk, the engine fills the other; many small tensors share a chunk. All
workers of a group map the same chunks. Knows bytes and element sizes; names of tensors and their places in the model
are the runner's. `worker/proxy.py` and `group/workers.py` make the `TensorTransfer`, `worker/main.py` the
`TensorReceiver`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.errors import FdasyncError, InvariantBroken, WeightsBroken, WeightsRejected
from fdasync.ipc.remote import remote
from fdasync.ipc.shared_memory import SharedRegion, page_aligned
from fdasync.request import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.runner.base import Runner

    # calls a method of one worker's `TensorReceiver`; the future ends with its answer
    Send = Callable[..., asyncio.Future[None]]
    # waits for the answers of all workers, and raises the error of any
    Wait = Callable[[Sequence[asyncio.Future[None]]], Awaitable[object]]

#: most bytes of each of the two chunks
CHUNK_NBYTES = 256 << 20
_NUM_CHUNKS = 2
# dtypes that numpy has no name for
_OTHER_NBYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# the loop runs other work between slices: about half a millisecond of copying into fresh pages
_SLICE_NBYTES = 1 << 20
# of each piece: enough for any dtype, and copies of whole cache lines are fast
_ALIGN_NBYTES = 64


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of `TensorMeta.dtype`. Raises WeightsRejected for an unknown name."""
    if dtype in _OTHER_NBYTES:
        return _OTHER_NBYTES[dtype]
    try:
        return np.dtype(dtype).itemsize
    except (TypeError, ValueError, SyntaxError):
        raise WeightsRejected(f"there is no dtype {dtype!r}") from None


def nbytes_of(tensor: TensorMeta) -> int:
    """Bytes of a tensor. Raises WeightsRejected for an unknown dtype."""
    return math.prod(tensor.shape) * itemsize_of(tensor.dtype)


class TensorTransfer:
    """The engine's side of updates, one at a time.

    Args:
        sends: one for each worker, by rank.
        chunk_nbytes: bound on each of the two chunks.
        named: the error of a worker, by its number, as the caller is told it.
    """

    def __init__(
        self,
        sends: Sequence[Send],
        chunk_nbytes: int,
        named: Callable[[BaseException, int], BaseException] = lambda error, _number: error,
    ) -> None:
        self._sends = tuple(sends)
        self._chunk_nbytes = chunk_nbytes
        self._named = named
        self._sender: TensorSender | None = None

    @property
    def is_open(self) -> bool:
        """An update has begun and not ended."""
        return self._sender is not None

    async def begin(self, tensors: Sequence[TensorMeta], wait: Wait) -> None:
        """Announce tensors to all workers. An earlier update that has not ended is dropped. Raises WeightsRejected, and
        as `wait`; then the update has ended."""
        self.close()
        sender = self._sender = TensorSender(tensors, self._sends, self._chunk_nbytes, self._named)
        try:
            await wait(sender.begin())
        except Exception:
            self.close()
            raise

    async def write(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        """See `Runner.write_tensor`. Raises the error of any worker for an earlier piece; then the update has ended."""
        if self._sender is None:
            raise InvariantBroken("write_tensor without begin_tensors")
        try:
            await self._sender.write(number, offset_nbytes, data)
        except FdasyncError:
            self.close()
            raise

    async def end(self, wait: Wait) -> None:
        """Wait until all workers have written every byte, and have ended the update. Raises as `write` and `wait`."""
        if self._sender is None:
            raise InvariantBroken("end_tensors without begin_tensors")
        try:
            await self._sender.end()
            await wait([send(TensorReceiver.end_tensors) for send in self._sends])
        finally:
            self.close()

    def close(self) -> None:
        """End the update and give its memory back; idempotent."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class TensorSender:
    """The engine's side of one update.

    Args:
        tensors: in the order of `write`.
        sends, named: see `TensorTransfer`.
        chunk_nbytes: most bytes of a chunk; a small update makes smaller ones.

    Raises WeightsRejected where there is no memory for the chunks, or a dtype is unknown.
    """

    def __init__(
        self,
        tensors: Sequence[TensorMeta],
        sends: Sequence[Send],
        chunk_nbytes: int = CHUNK_NBYTES,
        named: Callable[[BaseException, int], BaseException] = lambda error, _number: error,
    ) -> None:
        self._tensors = tensors
        self._sends = tuple(sends)
        self._named = named
        total = sum(_aligned(nbytes_of(tensor)) for tensor in tensors)
        self._chunk_nbytes = page_aligned(max(1, min(chunk_nbytes, total)))
        self._chunks: list[SharedRegion] = []
        # answers of the workers that have not read a chunk yet, by chunk
        self._acks: list[list[asyncio.Future[None]]] = [[] for _ in range(_NUM_CHUNKS)]
        self._at = 0
        self._filled = 0
        self._pieces: list[Piece] = []
        try:
            for _ in range(_NUM_CHUNKS):
                self._chunks.append(SharedRegion.create("tensors", self._chunk_nbytes))
        except OSError as error:
            self.close()
            raise WeightsRejected(f"there is no shared memory for the transfer: {error.strerror}") from error

    def begin(self) -> list[asyncio.Future[None]]:
        """Tell all workers; comes first. The futures end with their answers."""
        return [send(TensorReceiver.begin_tensors, self._tensors, self._chunks) for send in self._sends]

    async def write(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        """Pack the next bytes of a tensor, whole elements; full chunks go out. `data` is the caller's on return.

        Lets other work of the loop run after every slice. Raises a worker's error for an earlier chunk.
        """
        data = data.cast("B")
        done = 0
        while done < len(data):
            # whole elements of any dtype: pieces and chunks are aligned to more than the largest element
            room = self._chunk_nbytes - self._filled
            if not room:
                await self._flush()
                continue
            nbytes = min(room, len(data) - done)
            await self._wait_for(self._at)
            await self._copy(data[done : done + nbytes])
            self._pieces.append(Piece(number, offset_nbytes + done, self._filled, nbytes))
            self._filled = _aligned(self._filled + nbytes)
            done += nbytes

    async def end(self) -> None:
        """Send the last chunk and wait until all workers have written all. Raises the first worker's error."""
        if self._pieces:
            await self._flush()
        for number in range(_NUM_CHUNKS):
            await self._wait_for(number)

    def close(self) -> None:
        """Give the memory back; idempotent. Workers have mappings of their own."""
        for chunk in self._chunks:
            chunk.close()

    async def _copy(self, data: memoryview) -> None:
        with self._chunks[self._at].view(self._filled, len(data)) as target:
            for first in range(0, len(data), _SLICE_NBYTES):
                target[first : first + _SLICE_NBYTES] = data[first : first + _SLICE_NBYTES]
                await asyncio.sleep(0)

    async def _flush(self) -> None:
        self._acks[self._at] = [send(TensorReceiver.write_chunk, self._at, self._pieces) for send in self._sends]
        self._pieces = []
        self._filled = 0
        self._at = (self._at + 1) % _NUM_CHUNKS
        # raises the error of the other chunk, if a worker failed to write it
        await self._wait_for(self._at)

    async def _wait_for(self, chunk: int) -> None:
        """Wait until all workers have read the chunk. The engine's deadline for updates bounds the wait."""
        acks = self._acks[chunk]
        if not acks:
            return
        # cancelling the wait must not cancel the answers: a worker reads the chunk until it answers. A failed answer
        # ends the update, whatever the others do
        await asyncio.wait(acks, return_when=asyncio.FIRST_EXCEPTION)
        for number, ack in enumerate(acks):
            error = ack.exception() if ack.done() else None
            if error is not None:
                raise self._named(error, number)
        self._acks[chunk] = []


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a tensor in a chunk.

    Attributes:
        number: of the tensor, in `begin_tensors`.
        offset_nbytes: in the tensor.
        at_nbytes: in the chunk.
        nbytes: of the piece.
    """

    number: int
    offset_nbytes: int
    at_nbytes: int
    nbytes: int


class TensorReceiver:
    """The worker's side: maps the chunks of an update, and hands their pieces to the runner in the order sent."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # empty without an update
        self._chunks: Sequence[SharedRegion] = ()
        self._broken = ""

    @remote()
    async def begin_tensors(self, tensors: Sequence[TensorMeta], chunks: Sequence[SharedRegion]) -> None:
        """Tensors will come, through these chunks. An earlier update that has not ended is dropped. Raises as
        `Runner.begin_tensors`."""
        self.close()
        self._chunks, self._broken = chunks, ""
        try:
            await self._runner.begin_tensors(tensors)
        except BaseException:
            self.close()
            raise

    @remote()
    async def write_chunk(self, chunk: int, pieces: Sequence[Piece]) -> None:
        """Hand the pieces to the runner; with the answer the chunk is the engine's again. After a failure nothing more
        is written. Raises WeightsBroken, and InvariantBroken without an update."""
        if not self._chunks:
            raise InvariantBroken("a chunk came without begin_tensors")
        if self._broken:
            raise WeightsBroken(self._broken)
        try:
            for piece in pieces:
                with self._chunks[chunk].view(piece.at_nbytes, piece.nbytes) as data:
                    await self._runner.write_tensor(piece.number, piece.offset_nbytes, data)
        except Exception as error:
            self._broken = error.problem if isinstance(error, WeightsBroken) else f"{type(error).__name__}: {error}"
            raise WeightsBroken(self._broken) from error

    @remote()
    async def end_tensors(self) -> None:
        """Every byte was written. Raises as `Runner.end_tensors`."""
        self.close()
        await self._runner.end_tensors()

    def close(self) -> None:
        """Drop the mappings; idempotent."""
        for chunk in self._chunks:
            chunk.close()
        self._chunks = ()


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN_NBYTES - 1) // _ALIGN_NBYTES * _ALIGN_NBYTES
