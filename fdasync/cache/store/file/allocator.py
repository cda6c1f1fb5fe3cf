"""Where the next object of a file store goes: free slots, new segments, evictions, within the cap and the disk.

It takes decisions from the index (`index.py`) and makes and drops the segment files, one at a time. It does not know
what an object is. `file/store.py` calls it on its loop; syscalls go to the threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading  # threads: in the store's process, which is no engine
from collections import deque
from concurrent.futures import ThreadPoolExecutor  # threads: the same
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fdasync.cache.store.base import Outcome, finish
from fdasync.cache.store.file.index import Drop, Grow, Place, Segment
from fdasync.cache.store.file.io import FULL, IoError, make_segment, mark_segment, no_room
from fdasync.cache.store.file.layout import CLEAN, Shape, least_nbytes
from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from fdasync.cache.store.file.index import FileIndex

T = TypeVar("T")
U = TypeVar("U")
_FULL_DISK_S = 5.0  # how long no file is made on a disk that was full


class _Batch(Generic[T, U]):
    """One call of `Threads.each`: threads take the numbers of its items.

    Attributes:
        ended: done, on the loop, when every item is.
        results: by number.
        error: the latest that an item raised.
        numbers: of the items that no thread has taken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, items: Sequence[T], work: Callable[[T], U]) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.results: dict[int, U] = {}
        self.error: BaseException | None = None
        # this iterator and the counter are atomic: no number is given twice
        self.numbers = iter(range(len(items)))
        self._counts = itertools.count(1)
        self._loop = loop
        self._items = items
        self._work = work

    def perform(self, number: int) -> None:
        """In a thread."""
        try:
            self.results[number] = self._work(self._items[number])
        except BaseException as error:  # `each` raises it on the loop
            self.error = error
        if next(self._counts) == len(self._items):
            self._loop.call_soon_threadsafe(self.ended.set_result, None)


class Threads:
    """A few threads for calls that block. Used from one loop; closed when nothing runs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running = 0
        self._batches: deque[_Batch[Any, Any]] = deque()
        self._takers = 0
        self._jobs: deque[None] = deque()  # calls of `run` that no thread has begun
        # threads: of the store's own process; reads and writes of files block, however they are opened
        self._started: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(count, "fdasync-file", lambda: self._started.append(threading.current_thread()))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)`; a cancellation is raised after its end."""
        self._running += 1
        self._jobs.append(None)
        try:
            loop = asyncio.get_running_loop()
            return await finish(loop.run_in_executor(self._pool, self._job, work, *arguments))  # threads: see the class
        finally:
            self._running -= 1

    def _job(self, work: Callable[..., T], *arguments: Any) -> T:
        self._jobs.pop()
        return work(*arguments)

    async def each(self, items: Sequence[T], work: Callable[[T], U]) -> list[U]:
        """`work` of every item; results in order, after the last one. A cancellation is raised then too.

        Threads take item after item, of the oldest call first: no thread idles while an item is left.
        """
        if not items:
            return []
        loop = asyncio.get_running_loop()
        batch = _Batch(loop, items, work)
        self._batches.append(batch)
        for _ in range(min(self._count - self._takers, len(items))):
            self._take(loop)
        try:
            await finish(batch.ended)
            if batch.error is not None:
                raise batch.error
        finally:
            # its traceback refers to the batch, and so to the caller's memory: leave no cycle
            batch.error = None
        return [batch.results[number] for number in range(len(items))]

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        self._takers += 1
        taking = loop.run_in_executor(self._pool, self._take_items)  # threads: see the class
        taking.add_done_callback(self._taken)

    def _take_items(self) -> None:
        """In a thread: take items until none is left or a job waits; at least one, so that jobs starve no batch."""
        while True:
            try:
                batch = self._batches[0]
            except IndexError:
                return
            number = next(batch.numbers, None)
            if number is None:
                with contextlib.suppress(ValueError):  # another thread was first
                    self._batches.remove(batch)
                continue
            batch.perform(number)
            if self._jobs:
                return

    def _taken(self, taken: asyncio.Future[None]) -> None:
        self._takers -= 1
        if self._batches:
            self._take(taken.get_loop())

    async def spread(self, items: list[T], work: Callable[[list[T]], list[U]]) -> list[U]:
        """As `each`, with neighbours together: as many runs of items as there are idle threads, or one."""
        size = max(1, -(-len(items) // max(1, self._count - self._running - self._takers)))
        runs = [items[first : first + size] for first in range(0, len(items), size)]
        return [result for results in await self.each(runs, work) for result in results]

    async def close(self) -> None:
        """End the threads; nothing may run any more."""
        # a taker may be on its way back from the last item, and start again for a batch that is still in the list
        while self._takers:  # noqa: ASYNC110 - the callback at its end may start it again
            await asyncio.sleep(0.0002)
        self._pool.shutdown(wait=False)
        # to join them would block; they have nothing to do but end
        while any(thread.is_alive() for thread in self._started):  # noqa: ASYNC110 - a thread's end calls nothing
            await asyncio.sleep(0.0002)


class Keys:
    """Keys whose object is being put, deleted or cleared from the disk.

    A key is here or in the index, never in both.
    """

    def __init__(self) -> None:
        # the first waiter makes the future: nearly always nobody waits
        self._busy: dict[str, asyncio.Future[None] | None] = {}

    def claim(self, key: str) -> None:
        if key in self._busy:
            raise InvariantBroken(f"{key} is being worked on already")
        self._busy[key] = None

    def release(self, key: str) -> None:
        waited = self._busy.pop(key)
        if waited is not None:
            waited.set_result(None)

    def others(self, keys: Iterable[str]) -> list[asyncio.Future[None]]:
        """Futures to wait for before anything is done to these keys."""
        busy = []
        for key in keys:
            if key in self._busy:
                waited = self._busy[key]
                if waited is None:
                    waited = self._busy[key] = asyncio.get_running_loop().create_future()
                busy.append(waited)
        return busy


class SlotAllocator:
    """Slots for objects.

    Args:
        index: the folder's, owned by the store.
        keys: the keys in work, owned by the store.
        next_number: of the next segment.
        boot: the mark of a segment that is written to; `CLEAN` if every write is synced.
    """

    def __init__(
        self, folder: Path, index: FileIndex, keys: Keys, threads: Threads, next_number: int, boot: bytes
    ) -> None:
        self._folder = folder
        self._index = index
        self._keys = keys
        self._threads = threads
        self._next_number = next_number
        self._boot = boot
        self._lock = asyncio.Lock()
        self._full_until = 0.0
        self._full_words = ""

    async def place(self, nbytes: int) -> Place | Outcome:
        """A claimed slot for an object of `nbytes`, or the outcome of the put if there is none."""
        least = least_nbytes(nbytes)
        if least > self._index.max_nbytes:
            return Outcome("full", f"it never fits: it takes {least} bytes and the cap is {self._index.max_nbytes}")
        stride = page_aligned(nbytes)
        step = self._find(stride)
        while isinstance(step, Grow | Drop):
            async with self._lock:
                step = self._find(stride)  # another put may have made room meanwhile
                try:
                    if isinstance(step, Grow):
                        await self._grow(stride, step.slots)
                    elif isinstance(step, Drop):
                        await self.drop(step.segment)
                except OSError as error:
                    trouble = IoError.of(error)
                    if trouble.code not in FULL or not isinstance(step, Grow):
                        return trouble.outcome()
                    # for a while the files that exist must do
                    wanted = Shape(stride, step.slots, 0).nbytes
                    self._full_words = await self._threads.run(no_room, self._folder, wanted, trouble.words)
                    self._full_until = asyncio.get_running_loop().time() + _FULL_DISK_S
                    self._index.limit_nbytes = self._index.total_nbytes
            if not isinstance(step, Place):
                step = self._find(stride)
        return step if step is not None else Outcome("full", self._full_words or "all of its objects are in use")

    async def enforce_cap(self) -> None:
        """Drop the segments used longest ago until the cap holds. Raises OSError."""
        while self._index.total_nbytes > self._index.max_nbytes and (cold := self._index.coldest()) is not None:
            await self.drop(cold)

    async def drop(self, segment: Segment) -> None:
        """Remove a segment and its objects. Raises OSError; then the segment stays, and is not believed."""
        keys = [entry.key for entry in segment.entries.values()]
        for key in keys:
            self._keys.claim(key)
        self._index.remove_segment(segment)
        path = self._folder / segment.shape.name

        def unlink() -> None:
            path.unlink(missing_ok=True)
            os.close(segment.fd)

        try:
            await self._threads.run(unlink)
        except OSError:
            segment.believed = False
            segment.entries.clear()
            segment.free.clear()
            segment.stale.clear()
            self._index.add_segment(segment)
            raise
        finally:
            for key in keys:
                self._keys.release(key)

    async def mark(self, segments: Iterable[Segment]) -> None:
        """Before the first write to a segment since `open`: say in its head that the disk may lack writes of this boot.

        Raises OSError.
        """
        unmarked = [segment for segment in segments if segment.boot != self._boot]
        if not unmarked:
            return
        async with self._lock:
            for segment in unmarked:
                if segment.boot != self._boot:
                    await self._threads.run(mark_segment, segment.fd, segment.shape, self._boot)
                    segment.boot = self._boot

    async def _grow(self, stride: int, slots: int) -> None:
        shape = Shape(stride, slots, self._next_number)
        self._next_number += 1
        synced = self._boot == CLEAN
        fd = await self._threads.run(lambda: make_segment(self._folder, shape, self._boot, synced=synced))
        segment = Segment(shape, fd, self._boot)
        segment.free = list(reversed(range(slots)))
        self._index.add_segment(segment)

    def _find(self, stride: int) -> Place | Grow | Drop | None:
        if self._full_words and asyncio.get_running_loop().time() >= self._full_until:
            self._full_words = ""
            self._index.limit_nbytes = self._index.max_nbytes
        return self._index.find(stride)
