"""Copies of KV blocks, whole or one rank's part, between the device pool and the host tier's shared memory, as futures.

The device reads and writes the arena's own pages, which are registered with the driver once: there is no staging
buffer. One call is one submission on the stream of its direction, or several with turns of the loop between them
where one submission would take the CPU for more than 0.3 ms. Copies go to the driver in batches: beside a step they run
at the speed of the bus and the step hardly feels them, while a kernel that copies makes the step up to three times as
long. A driver that knows no batches gets one copy a block. On a CPU device numpy copies rows, a few each turn, and the
copies complete through the same port.

No stream waits for another here, and none has to: blocks copied out were written by steps whose completion was
already observed, blocks copied in are fresh and used by steps launched after the future. The caller keeps to that, and
pins both ends until the future is done.

Knows nothing of rows, requests or identities. Called by runners.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fdasync.errors import DeadlineExceeded, InvariantBroken
from fdasync.gpu.block_rows import BlockRows
from fdasync.gpu.completion import when_done
from fdasync.gpu.cudart import Driver, RegisteredHost
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch
    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena, HostPart
    from fdasync.gpu.block_rows import Lane
    from fdasync.gpu.completion import CompletionPort
    from fdasync.gpu.pools import EventPool
    from fdasync.gpu.streams import Streams


class Way(Protocol):
    """One way to launch copies.

    Attributes:
        name: for logs.
        at_once: most blocks in one submission, so that it takes under 0.3 ms of CPU.
    """

    name: str
    at_once: int

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        """Launch on the lane's stream, which is current."""
        ...


class _AddressWay:
    """Base of the ways that name addresses. `device` uint8 [num_blocks, nbytes]; `host` [num_host_blocks] addresses."""

    def __init__(self, driver: Driver, device: torch.Tensor, host: NDArray[np.uint64], streams: Streams) -> None:
        self._driver = driver
        self._nbytes = int(device.shape[1])
        blocks = np.arange(len(device), dtype=np.uint64)
        self._device = np.uint64(device.data_ptr()) + blocks * np.uint64(device.stride(0))
        self._host = host
        self._streams = streams

    def _ends(
        self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Addresses of the targets, and of the sources."""
        there, here = self._host[host], self._device[device]
        return (there, here) if lane == "copy_out" else (here, there)


class BatchWay(_AddressWay):
    """All copies in one call of the driver."""

    name = "batch"
    # 0.6 us a block and 40 us a call on an H200's host: 0.2 ms, and the first call of a job checks ids besides
    at_once = 256

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        targets, sources = self._ends(lane, device, host)
        nbytes = np.full(len(device), self._nbytes, np.uint64)
        self._driver.copy_batch(targets, sources, nbytes, self._streams.handle(lane))


class SingleWay(_AddressWay):
    """One call of the driver for each block; every driver has it."""

    name = "single"
    # 2.6 to 3.1 us a block
    at_once = 80

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        targets, sources = self._ends(lane, device, host)
        stream = self._streams.handle(lane)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self._driver.copy(target, source, self._nbytes, stream)


class _Job:
    """One call of `out` or `back`, from its first submission to its completion."""

    def __init__(
        self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.lane: Lane = lane
        self.device = device
        self.host = host
        self.given = 0
        # the caller's: cancelling it stops the waiting only
        self.waiter: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()


class BlockCopies:
    """Moves blocks of one pool; use it from the loop of `port`.

    `blocks` is the pool [num_blocks, elements] of any dtype, each row one run of bytes: `part` of the blocks that
    `host` holds, or all of each (None). Both belong to the caller and live until `aclose` has returned. On CUDA the
    arena is registered here, which blocks for about half a second for each GB: make it at start-up, before steps run.

    `driver` is for tests. Raises InvariantBroken where sizes do not fit or rows are no runs of bytes, RunnerError where
    the pages cannot be registered.

    Attributes:
        block_nbytes: bytes of a row of the pool.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        host: HostArena,
        streams: Streams,
        events: EventPool[Any],
        port: CompletionPort,
        part: HostPart | None = None,
        *,
        driver: Driver | None = None,
    ) -> None:
        self._rows = BlockRows(blocks, host, part)
        self.block_nbytes = self._rows.block_nbytes
        # calls that ended without their completion being seen: the device may still use their blocks
        self._lost = 0
        self._streams = streams
        self._events = events
        self._port = port
        self._jobs: dict[_Job, None] = {}
        self._closing = False
        self._registered: RegisteredHost | None = None
        self._way: Way = self._rows
        if blocks.is_cuda or driver is not None:
            driver = driver or Driver()
            self._registered = RegisteredHost(driver, host)  # blocking: pins the pages, once, at start-up
            kind = BatchWay if driver.has_batch else SingleWay
            places = self._registered.addresses + np.uint64(self._rows.part.offset_nbytes)
            self._way = kind(driver, self._rows.rows, places, streams)
            # the pool's first contents were written on another stream
            streams.follow()

    def out(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> asyncio.Future[int]:
        """Copy block `device_ids[i]` of the pool to block `host_ids[i]` of the arena; the future gives bytes moved.

        If another process writes the pool's part, nothing is copied, and the future gives 0 at once.

        Cancelling the future stops the waiting, not the copies: both ends stay pinned until the device is done, and
        only a future that was not cancelled tells when that is. Raises InvariantBroken before anything is copied: an id
        that does not exist, lists of two lengths, a destination named twice, a call after `aclose`. The future fails
        with DeviceFailed after an error of the device.
        """
        return self._start("copy_out", device_ids, host_ids)

    def back(self, host_ids: Sequence[int], device_ids: Sequence[int]) -> asyncio.Future[int]:
        """Copy block `host_ids[i]` of the arena to block `device_ids[i]` of the pool; as `out`."""
        return self._start("copy_in", device_ids, host_ids)

    @property
    def way(self) -> str:
        """How copies are launched, for logs: "batch", "single" (the driver knows no batches) or "rows" (a CPU)."""
        return self._way.name

    @property
    def lost(self) -> int:
        """Calls that failed: their blocks may still be written to, so the pages stay registered for good."""
        return self._lost

    async def aclose(self, deadline_s: float = 10.0) -> None:
        """Take no more calls, wait for those in flight, unregister the pages; idempotent.

        Close the port after it: the port sees the copies end. Raises DeadlineExceeded naming the copies in flight
        (the pages stay registered then), RunnerError where the driver refuses to unregister. Cancelling it stops the
        waiting.
        """
        self._closing = True
        if self._jobs:
            await wait_within([job.ended for job in self._jobs], deadline_s)
        if self._jobs:
            stuck = ", ".join(f"{job.lane} of {len(job.device)} blocks" for job in self._jobs)
            raise DeadlineExceeded(f"block copies in flight ({stuck})", deadline_s)
        self.unpin()

    def unpin(self) -> None:
        """Take no more calls, and unregister the pages at once; idempotent. No call is in flight: for a start that
        fails behind this part of it. Raises as `aclose`."""
        if self._jobs:
            raise InvariantBroken(f"{len(self._jobs)} copies are in flight, and their pages are to be unpinned")
        self._closing = True
        registered, self._registered = self._registered, None
        if registered is None:
            return
        if self._lost or self._port.problem is not None:
            # the device may still write there, and takes no calls after a failure
            registered.keep_for_good()
        else:
            registered.close()  # blocking: unpins the pages, once, when nothing runs any more

    def _start(self, lane: Lane, device_ids: Sequence[int], host_ids: Sequence[int]) -> asyncio.Future[int]:
        if self._closing:
            raise InvariantBroken("a copy of blocks after the close")
        device, host = self._rows.ids(lane, device_ids, host_ids)
        job = _Job(lane, device, host, asyncio.get_running_loop())
        if len(device) and self._rows.moves(lane):
            self._jobs[job] = None
            self._submit(job)
        else:
            job.waiter.set_result(0)
        return job.waiter

    def _submit(self, job: _Job) -> None:
        """Launch the next part of a job now, the rest in later turns of the loop."""
        part = slice(job.given, job.given + self._way.at_once)
        try:
            with self._streams.on(job.lane):
                self._way.submit(job.lane, job.device[part], job.host[part])
            job.given += len(job.device[part])
            if job.given < len(job.device):
                asyncio.get_running_loop().call_soon(self._submit, job)
                return
            hold = self._events.take(job.lane)
            self._streams.record(job.lane, hold.event)
            done = self._port.completion(hold.event, lane=job.lane, kind=self._kind(job), holds=(hold,))
        except Exception as error:
            # earlier parts of the job may run
            self._end(job, error)
        else:
            when_done(done, functools.partial(self._seen, job))

    def _kind(self, job: _Job) -> Hashable:
        """Calls of like duration: counts that agree in their first four binary digits."""
        count = len(job.device)
        coarse = max(0, count.bit_length() - 4)
        return (job.lane, count >> coarse << coarse)

    def _seen(self, job: _Job, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._end(job, InvariantBroken("a completion of block copies was cancelled under its owner"))
        else:
            self._end(job, done.exception())

    def _end(self, job: _Job, error: BaseException | None) -> None:
        del self._jobs[job]
        job.ended.set_result(None)
        if error is not None:
            self._lost += 1
        if job.waiter.done():
            return
        if error is not None:
            job.waiter.set_exception(error)
        else:
            job.waiter.set_result(len(job.device) * self.block_nbytes)
