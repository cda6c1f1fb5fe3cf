"""A pool in device memory that other processes map: copies over NVLink or PCIe, and checksums by a kernel.

Copies and the checksums behind them run on a stream of their own, so neither steps nor copies to the host wait for
them, and end in one event. Knows bytes, and no blocks; see `ipc/peers/pool.py`. Made by runners.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
import torch

from fdasync.errors import DeviceFailed, RunnerError
from fdasync.gpu.mapped_memory import MappedMemory
from fdasync.gpu.packed_copy import fetch, send
from fdasync.ipc.futures import failed
from fdasync.ipc.peers.pool import PeerPool
from fdasync.ipc.peers.sums import WORD_NBYTES, added

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fdasync.gpu.completion import CompletionPort, Hold
    from fdasync.gpu.cudart import Driver
    from fdasync.gpu.pools import EventPool, PinnedPool
    from fdasync.gpu.streams import Streams
    from fdasync.ipc.peers.pool import Copies, Sums

_LANE: Final = "peers"
# runs of one call of the driver
_AT_ONCE = 256


class Memory(Protocol):
    """What is mapped; `MappedMemory` has it."""

    address: int
    nbytes: int

    def tensor(self) -> torch.Tensor: ...

    def export(self) -> int: ...

    def close(self) -> None: ...


class RunSums(Protocol):
    """int64 [runs, chunks] of memory [words], places [runs], bytes of each run and where it begins in its block."""

    def __call__(
        self, memory: torch.Tensor, places: torch.Tensor, nbytes: int, first_nbytes: int, /
    ) -> torch.Tensor: ...


class DevicePool(PeerPool[Memory]):
    """See the module. Used from the loop of `port`.

    Args:
        memory: the pool's, the caller's, and open until `aclose` has returned. A whole number of words long.
        tensor: uint8 [nbytes], the same memory.
        run_sums: the checksums of runs of words, as chunks that add up to them; see
            `fdasync_kernels.block_sums.run_sums`.
        opener: maps a peer's memory of so many bytes, by its descriptor.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(
        self,
        memory: Memory,
        tensor: torch.Tensor,
        driver: Driver,
        streams: Streams,
        events: EventPool[Any],
        pinned: PinnedPool,
        port: CompletionPort,
        run_sums: RunSums,
        opener: Callable[[int, int], Memory] | None = None,
    ) -> None:
        super().__init__(memory.nbytes)
        self._memory = memory
        self._words = tensor.view(torch.int64)
        self._driver = driver
        self._streams = streams
        self._events = events
        self._pinned = pinned
        self._port = port
        self._opener = opener or partial(MappedMemory.open, driver, tensor.device)
        # compiled here, at start-up: later it would make the process deaf for seconds
        self._run_sums = run_sums
        run_sums(self._words, torch.zeros(1, dtype=torch.int64, device=tensor.device), WORD_NBYTES, 0)
        # the pool's first contents were written on another stream
        streams.follow()

    def export(self) -> int:
        return self._memory.export()

    def open(self, fd: int, nbytes: int) -> Memory:
        return self._opener(fd, nbytes)

    def close_peer(self, opened: Memory) -> None:
        opened.close()

    def _begin(self, copies: Sequence[Copies[Memory]], sums: Sequence[Sums]) -> asyncio.Future[list[int]]:
        runs = sum([len(wanted.places) for wanted in sums])
        try:
            # first: where there is none, nothing is queued
            event = self._events.take(_LANE)
        except Exception as error:
            return failed(_not_launched(error))
        holds: list[Hold] = [event]
        found, problem = self._queue(copies, sums, holds)
        try:
            self._streams.record(_LANE, event.event)
            return self._port.completion(
                event.event,
                lane=_LANE,
                kind=(_LANE, len(copies) > 0, runs.bit_length()),
                holds=holds,
                on_done=partial(_read, found, problem),
            )
        except Exception as error:
            # the copies run on, and nothing tells when they end: the memory they use is not given back
            return failed(DeviceFailed(f"nothing tells when copies from a peer end: {error}"))

    def _queue(
        self, copies: Sequence[Copies[Memory]], sums: Sequence[Sums], holds: list[Hold]
    ) -> tuple[dict[str, NDArray[Any]], Exception | None]:
        """Queue copies and checksums; returns the chunks of the checksums, to be read when all is done, and why not all
        is queued. Work queued before an error runs on, so the error is told after it. `holds`: what the device uses."""
        try:
            with self._streams.on(_LANE):
                for batch in copies:
                    self._copy(batch)
                return self._sum(sums, holds), None
        except Exception as error:  # of torch, Triton and the driver
            return {}, error

    def _copy(self, batch: Copies[Memory]) -> None:
        stream = self._streams.handle(_LANE)
        targets = (batch.targets + self._memory.address).astype(np.uint64)
        sources = (batch.sources + batch.peer.address).astype(np.uint64)
        sizes = batch.nbytes.astype(np.uint64)
        if not self._driver.has_batch:
            for run in range(len(sizes)):
                self._driver.copy(int(targets[run]), int(sources[run]), int(sizes[run]), stream)
            return
        for first in range(0, len(sizes), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self._driver.copy_batch(targets[part], sources[part], sizes[part], stream)

    def _sum(self, sums: Sequence[Sums], holds: list[Hold]) -> dict[str, NDArray[Any]]:
        """Launch the checksums; see `_queue`."""
        if not sums:
            return {}
        names = [str(number) for number in range(len(sums))]
        given = {name: wanted.places // WORD_NBYTES for name, wanted in zip(names, sums, strict=True)}
        places, sent = send(given, self._pinned, self._words.device)
        holds.append(sent)
        chunks = {
            name: self._run_sums(self._words, places[name], wanted.nbytes, wanted.first_nbytes)
            for name, wanted in zip(names, sums, strict=True)
        }
        found, fetched = fetch(chunks, self._pinned)
        holds.append(fetched)
        return found


def _read(found: dict[str, NDArray[Any]], problem: Exception | None) -> list[int]:
    """The checksum of each run, from the checksums of its chunks. Raises RunnerError where not all was queued."""
    if problem is not None:
        raise _not_launched(problem) from problem
    return [added(chunks) for array in found.values() for chunks in array.tolist()]


def _not_launched(error: Exception) -> RunnerError:
    return RunnerError(f"copies from a peer could not be launched: {error}")
