"""Where the next object of a file store goes: free slots, new segments, evictions, within the cap and the disk.

Joins the books (`index.py`) with the files that they speak of, which are made and dropped here, one at a time.
Runs on the loop of `file/store.py`; syscalls go to its threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading  # threads: hosted in a process of its own, which is no engine
from collections import deque
from concurrent.futures import ThreadPoolExecutor  # threads: the same
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fdasync.cache.store.base import Outcome, finish
from fdasync.cache.store.file.index import Drop, Grow, Place, Segment
from fdasync.cache.store.file.io import FULL, Trouble, make_segment, mark_segment, no_room
from fdasync.cache.store.file.layout import CLEAN, Shape, least_nbytes
from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from fdasync.cache.store.file.index import FileIndex

T = TypeVar("T")
U = TypeVar("U")
_FULL_DISK_S = 5.0  # so long a disk that was full is not asked for more


class _Batch(Generic[T, U]):
    """One call of `Threads.each`. Threads take the numbers; its last item sets `ended`, on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, items: Sequence[T], work: Callable[[T], U]) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.results: dict[int, U] = {}
        self.error: BaseException | None = None
        # both hand out each number once, whichever threads ask
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
    """A few threads for what blocks. Use from one loop; `close` when nothing runs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running = 0
        self._batches: deque[_Batch[Any, Any]] = deque()
        self._takers = 0
        self._jobs: deque[None] = deque()  # those of `run` that no thread has begun
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

        Threads take item after item, of the call that came first: none idles while there is one to take.
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
            # its traceback knows the batch, and with it the caller's memory: no circle of these
            batch.error = None
        return [batch.results[number] for number in range(len(items))]

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        self._takers += 1
        taking = loop.run_in_executor(self._pool, self._take_items)  # threads: see the class
        taking.add_done_callback(self._taken)

    def _take_items(self) -> None:
        """In a thread: until nothing is left, or a job waits; one item at least, so that jobs keep none out."""
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
        """`work` over all items, neighbours together, in as many jobs as there are idle threads, or in one.

        Results in order, after the last job.
        """
        each = max(1, -(-len(items) // max(1, self._count - self._running)))
        jobs = [self.run(work, items[first : first + each]) for first in range(0, len(items), each)]
        if len(jobs) == 1:
            return await jobs[0]
        results: list[U] = []
        for ended in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
            results += ended
        return results

    async def close(self) -> None:
        """Their end; nothing may run any more."""
        # a taker may be on its way back from the last item, and be sent again for what it left in the list
        while self._takers:  # noqa: ASYNC110 - its end is told by a callback that may start it again
            await asyncio.sleep(0.0002)
        self._pool.shutdown(wait=False)
        # to join them would block; they have nothing to do but end
        while any(thread.is_alive() for thread in self._started):  # noqa: ASYNC110 - the end of a thread tells nobody
            await asyncio.sleep(0.0002)


class Keys:
    """Keys that somebody is at work on: putting or deleting them, or clearing what is left of them on disk.

    A key is here or in the index, never in both.
    """

    def __init__(self) -> None:
        self._busy: dict[str, asyncio.Future[None]] = {}

    def claim(self, key: str) -> None:
        if key in self._busy:
            raise InvariantBroken(f"{key} is being worked on already")
        self._busy[key] = asyncio.get_running_loop().create_future()

    def release(self, key: str) -> None:
        self._busy.pop(key).set_result(None)

    def others(self, keys: Iterable[str]) -> list[asyncio.Future[None]]:
        """What to wait for before anything is done to these keys."""
        return [self._busy[key] for key in keys if key in self._busy]


class FileRoom:
    """Slots for objects.

    Args:
        index: the folder's, owned by the store.
        keys: the same.
        next_number: of the next segment.
        boot: what marks a segment that is written to; `CLEAN` where every write is synced.
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
        """A claimed slot for an object of `nbytes`, or why there is none."""
        least = least_nbytes(nbytes)
        if least > self._index.max_nbytes:
            return Outcome("full", f"it never fits: it takes {least} bytes and the cap is {self._index.max_nbytes}")
        stride = page_aligned(nbytes)
        step = self._find(stride)
        while isinstance(step, Grow | Drop):
            async with self._lock:
                step = self._find(stride)  # somebody may have made room meanwhile
                try:
                    if isinstance(step, Grow):
                        await self._grow(stride, step.slots)
                    elif isinstance(step, Drop):
                        await self.drop(step.segment)
                except OSError as error:
                    trouble = Trouble.of(error)
                    if trouble.code not in FULL or not isinstance(step, Grow):
                        return trouble.outcome()
                    # for a while what is there has to do
                    wanted = Shape(stride, step.slots, 0).nbytes
                    self._full_words = await self._threads.run(no_room, self._folder, wanted, trouble.words)
                    self._full_until = asyncio.get_running_loop().time() + _FULL_DISK_S
                    self._index.limit_nbytes = self._index.total_nbytes
            if not isinstance(step, Place):
                step = self._find(stride)
        return step if step is not None else Outcome("full", self._full_words or "all that it holds is in use")

    async def enforce_cap(self) -> None:
        """Drop what was used longest ago until the cap holds. Raises OSError."""
        while self._index.total_nbytes > self._index.max_nbytes and (cold := self._index.coldest()) is not None:
            await self.drop(cold)

    async def drop(self, segment: Segment) -> None:
        """Give a segment back to the disk, with what is in it. Raises OSError; then it is there and not believed."""
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
        """Before the first write of this session to a segment: say in its head that the disk may lack some of them.

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
