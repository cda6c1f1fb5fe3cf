"""Copies of whole KV blocks between the device pool and the host tier's shared memory, as futures.

The device reads and writes the arena's own pages, which are registered with the driver once: there is no staging
buffer. One call is one submission on the stream of its direction, or several with turns of the loop between them
where one would take the CPU for more than half a millisecond. On a CPU device rows are copied by numpy, a few each
turn, and complete through the same port.

No stream waits for another here, and none has to: blocks copied out were written by steps whose completion was
already observed, blocks copied in are fresh and used by steps launched after the future. Who calls keeps that, and
pins both ends until the future is done.

Knows nothing of rows, requests or identities. Called by runners.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from fdasync.errors import DeadlineExceeded, InvariantBroken
from fdasync.gpu.cudart import Driver, RegisteredHost

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from fdasync.cache.host import HostArena
    from fdasync.gpu.completion import CompletionPort
    from fdasync.gpu.leases import EventPool
    from fdasync.gpu.streams import Streams

Lane = Literal["copy_out", "copy_in"]
WayName = Literal["batch", "single", "kernel"]


class Way(Protocol):
    """One way to launch copies.

    Attributes:
        at_once: blocks in one submission: about 0.3 ms of CPU.
    """

    at_once: int

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> object:
        """Launch on the lane's stream, which is current. Returns what must live until the copies are done."""
        ...


class RowsWay:
    """A CPU device: done when it returns. `device` uint8 [num_blocks, nbytes], `host` the arena's `kv`."""

    def __init__(self, device: NDArray[np.uint8], host: HostArena) -> None:
        self._device = device
        self._host = host
        # some GB/s: memory of one core
        self.at_once = max(1, (2 << 20) // host.block_nbytes)

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> object:
        # one by one: indexed copies of bytes run at a twentieth of the speed of these
        kv = self._host.kv
        for block, place in zip(device, host, strict=True):
            if lane == "copy_out":
                kv[place] = self._device[block]
            else:
                self._device[block] = kv[place]
        return None


class _AddressWay:
    """What ways that name addresses share."""

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
        """Where to, where from."""
        there, here = self._host[host], self._device[device]
        return (there, here) if lane == "copy_out" else (here, there)


class BatchWay(_AddressWay):
    """All copies in one call of the driver."""

    at_once = 256

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> object:
        targets, sources = self._ends(lane, device, host)
        nbytes = np.full(len(device), self._nbytes, np.uint64)
        self._driver.copy_batch(targets, sources, nbytes, self._streams.handle(lane))
        return None


class SingleWay(_AddressWay):
    """One call of the driver for each block; every driver has it."""

    at_once = 48

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> object:
        targets, sources = self._ends(lane, device, host)
        stream = self._streams.handle(lane)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self._driver.copy(target, source, self._nbytes, stream)
        return None


class KernelWay:
    """One kernel that reads and writes the host's pages; `host` is registered under its own addresses."""

    at_once = 4096

    def __init__(self, device: torch.Tensor, host: HostArena, programs: int = 16) -> None:
        # triton is loaded where it is used
        from fdasync.gpu.kernels.blocks import move_blocks, word_view

        self._move = move_blocks
        self._programs = programs
        rows = torch.from_numpy(host.kv)
        self._device, self._host = word_view(device), word_view(rows)
        if self._device.dtype != self._host.dtype:
            self._device, self._host = device, rows

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> object:
        return self._move(self._device, self._host, device, host, out=lane == "copy_out", programs=self._programs)


class _Job:
    """One call of `out` or `back`, from its first submission to its completion."""

    def __init__(
        self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.lane: Lane = lane
        self.device = device
        self.host = host
        self.given = 0
        self.kept: list[object] = []
        # the caller's: may be cancelled, which stops its waiting only
        self.waiter: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()


class BlockCopies:
    """Moves blocks of one pool; use it from the loop of `port`.

    `blocks` is the pool [num_blocks, elements] of any dtype, each row one run of bytes; `host` holds blocks of the
    same size. Both belong to the caller and live until `aclose` has returned. On CUDA the arena is registered here,
    which blocks for about half a second for each GB: make it at start-up, before steps run.

    `way` says how copies are launched on CUDA ("batch" falls back to "single" where the driver has none); `driver` is
    for tests. Raises InvariantBroken where sizes differ or rows are no runs of bytes, RunnerError where the pages
    cannot be registered.

    Attributes:
        block_nbytes: bytes of a block.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        host: HostArena,
        streams: Streams,
        events: EventPool[Any],
        port: CompletionPort,
        *,
        way: WayName = "batch",
        driver: Driver | None = None,
    ) -> None:
        if blocks.dim() != 2 or blocks.stride(1) != 1:
            raise InvariantBroken("the blocks of the pool are not one run of bytes each")
        device = blocks.view(torch.uint8)
        self.block_nbytes = int(device.shape[1])
        if host.block_nbytes != self.block_nbytes:
            raise InvariantBroken(f"host blocks have {host.block_nbytes} bytes, those of the pool {self.block_nbytes}")
        # calls that ended without their completion being seen: the device may still use what they keep
        self._lost: list[_Job] = []
        self._counts = (len(device), host.num_blocks)
        self._streams = streams
        self._events = events
        self._port = port
        self._jobs: dict[_Job, None] = {}
        self._closing = False
        self._registered: RegisteredHost | None = None
        self._way: Way
        if device.is_cuda or driver is not None:
            driver = driver or Driver()
            self._registered = RegisteredHost(driver, host)  # blocking: pins the pages, once, at start-up
            self._way = self._make_way(way, driver, device, host, self._registered)
            # the pool's first contents were written on another stream
            streams.follow()
        else:
            self._way = RowsWay(device.numpy(), host)

    def out(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> asyncio.Future[int]:
        """Copy block `device_ids[i]` of the pool to block `host_ids[i]` of the arena; the future gives bytes moved.

        Cancelling the future stops the waiting, not the copies: both ends stay pinned until the device is done, which
        only a future that was not cancelled tells. Raises InvariantBroken before anything is copied: an id that does
        not exist, lists of two lengths, a destination named twice, a call after `aclose`. The future fails with
        DeviceFailed after an error of the device.
        """
        return self._start("copy_out", device_ids, host_ids)

    def back(self, host_ids: Sequence[int], device_ids: Sequence[int]) -> asyncio.Future[int]:
        """Copy block `host_ids[i]` of the arena to block `device_ids[i]` of the pool; as `out`."""
        return self._start("copy_in", device_ids, host_ids)

    @property
    def lost(self) -> int:
        """Calls that failed: their blocks may still be written to, so the pages stay registered for good."""
        return len(self._lost)

    async def aclose(self, deadline_s: float = 10.0) -> None:
        """Take no more calls, wait for those in flight, unregister the pages; idempotent, may be called again.

        Close the port after it: the port sees the copies end. Raises DeadlineExceeded naming what is still in flight
        (the pages stay registered then), RunnerError where the driver refuses to unregister. Cancelling it stops the
        waiting.
        """
        self._closing = True
        if self._jobs:
            await asyncio.wait([job.ended for job in self._jobs], timeout=deadline_s)
        if self._jobs:
            stuck = ", ".join(f"{job.lane} of {len(job.device)} blocks" for job in self._jobs)
            raise DeadlineExceeded(f"block copies in flight ({stuck})", deadline_s)
        if self._registered is not None and not self._lost:
            self._registered.close()  # blocking: unpins the pages, once, when nothing runs any more
            self._registered = None
            # it may hold views of the pages
            del self._way

    def _make_way(
        self, name: WayName, driver: Driver, device: torch.Tensor, host: HostArena, registered: RegisteredHost
    ) -> Way:
        if name == "kernel" and registered.same:
            return KernelWay(device, host)
        kind = BatchWay if name == "batch" and driver.has_batch else SingleWay
        return kind(driver, device, registered.addresses, self._streams)

    def _start(self, lane: Lane, device_ids: Sequence[int], host_ids: Sequence[int]) -> asyncio.Future[int]:
        device, host = np.array(device_ids, np.int64), np.array(host_ids, np.int64)
        self._check(device, host, host if lane == "copy_out" else device)
        job = _Job(lane, device, host, asyncio.get_running_loop())
        if len(device):
            self._jobs[job] = None
            self._submit(job)
        else:
            job.waiter.set_result(0)
        return job.waiter

    def _check(self, device: NDArray[np.int64], host: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        if self._closing:
            raise InvariantBroken("a copy of blocks after the close")
        for name, blocks, count in zip(("device", "host"), (device, host), self._counts, strict=True):
            outside = blocks[(blocks < 0) | (blocks >= count)]
            if len(outside):
                raise InvariantBroken(f"{name} block {outside[0]} does not exist, there are {count}")
        if len(device) != len(host):
            raise InvariantBroken(f"{len(device)} device blocks and {len(host)} host blocks")
        # copies of one call run in any order
        if len(np.unique(targets)) != len(targets):
            raise InvariantBroken("two copies of one call write the same block")

    def _submit(self, job: _Job) -> None:
        """Launch the next part of a job; the rest after other work of the loop."""
        part = slice(job.given, job.given + self._way.at_once)
        try:
            with self._streams.on(job.lane):
                job.kept.append(self._way.submit(job.lane, job.device[part], job.host[part]))
            job.given += len(job.device[part])
            if job.given < len(job.device):
                asyncio.get_running_loop().call_soon(self._submit, job)
                return
            lease = self._events.take(job.lane)
            self._streams.record(job.lane, lease.event)
            done = self._port.completion(lease.event, lane=job.lane, kind=self._kind(job), leases=(lease,))
        except Exception as error:
            # parts of it may run
            self._end(job, error)
        else:
            done.add_done_callback(functools.partial(self._seen, job))

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
            self._lost.append(job)
        if job.waiter.done():
            return
        if error is not None:
            job.waiter.set_exception(error)
        else:
            job.waiter.set_result(len(job.device) * self.block_nbytes)
