"""A store in a folder: objects in the slots of a few large files, safe against any end of any process.

The index and the allocator (`index.py`, `allocator.py`) are used on the loop only, so they need no locks; syscalls run
in a few threads (`io.py`, `writes.py`). So the store runs in a process of its own (`blocking`), and that process alone
may have the folder open. `file/layout.py` and `docs/file-store.md` say where each byte lies. The module does not know
what objects mean. It is the plugin `file` of `fdasync.stores`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from fdasync.cache.store.base import (
    DONE,
    EXISTS,
    MISS,
    Capabilities,
    Item,
    Moves,
    Outcome,
    PlainMoves,
    Store,
    StoreUsage,
    finish,
)
from fdasync.cache.store.file.allocator import Keys, SlotAllocator, Threads
from fdasync.cache.store.file.index import Entry, FileIndex, Place
from fdasync.cache.store.file.io import (
    IoError,
    ReadSlot,
    clear_slots,
    read_slot,
    settle_segment,
    write_order,
)
from fdasync.cache.store.file.layout import CLEAN, MAX_KEY_CHARS, ORDER_NAME, Order, Record
from fdasync.cache.store.file.recovery import Loaded, boot_id, load, take_lock, why_not
from fdasync.cache.store.file.writes import WriteSlot, Written, runs_of, write_slots
from fdasync.cache.store.validation import check_items, check_keys
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, page_aligned

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from fdasync.ipc.shared_memory import SharedRegion

T = TypeVar("T")
_MAX_SEGMENTS = 512  # each is an open file, and a process may often have 1024 of them
# the order of use is written this often, and no more often than this many times the time that writing takes
_ORDER_EVERY_S = 30.0
_ORDER_SHARE = 100
# neighbouring slots that a thread writes together: more share calls, fewer share the work of a put among the threads
_RUN = 4
_WENT_AWAY = Outcome("failed", "the caller went away", transient=True)


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The folder and its limits.

    Attributes:
        path: the folder, never ""; made if it does not exist. One live engine at a time uses it.
        max_nbytes: the cap on all segment files; objects used longest ago make room. A lowered cap is enforced at the
            start.
        segment_nbytes: size of one file; larger if the cap would need more than 512 files.
        threads: threads that read and write. More than 2 gain nothing for blocks of 1 MiB.
        sync: "none": objects outlive any end of any process ("process"), and the machine's if the store was closed
            before; "data": they outlive loss of power ("machine"), at the price of syncs in every put.
    """

    path: str
    max_nbytes: Annotated[int, msgspec.Meta(ge=4 * PAGE_NBYTES)] = 16 << 30
    segment_nbytes: Annotated[int, msgspec.Meta(ge=4 * PAGE_NBYTES)] = 64 << 20
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    sync: Literal["none", "data"] = "none"


class _Call:
    """One running verb.

    Attributes:
        stopped: its caller went away: items that are not begun are left out.
    """

    def __init__(self) -> None:
        self.stopped = False

    def is_stopped(self) -> bool:
        return self.stopped


class FileStore(Store):
    """See the module.

    Attributes:
        damaged: how many slots and segments were found damaged at `open`.
    """

    config_type = FileConfig
    blocking = True

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        self._folder = Path(config.path)
        self._synced = config.sync == "data"
        self._regions: Sequence[SharedRegion] = ()
        self._lock_fd = -1
        self._threads: Threads | None = None
        self._room: SlotAllocator
        self._index = FileIndex(0, 0)
        self._next_sequence = 0
        self._calls: dict[asyncio.Task[Any], _Call] = {}
        self._keys = Keys()
        self._order_at = 0.0
        self._moves: Moves = PlainMoves(self._views)
        self._opened = self._closed = False
        # its folder was removed: the problem in words, and the attempt to make the folder again
        self._removed = ""
        self._again: asyncio.Task[None] | None = None
        self.damaged = 0
        self.capabilities = Capabilities(
            name="file",
            durability="machine" if self._synced else "process",
            max_key_chars=MAX_KEY_CHARS,
            capacity_nbytes=config.max_nbytes,
        )

    # -- life

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._closed or self._threads is not None:
            raise StoreUnavailable("file", "it was opened before")
        _check_path(self.config.path)
        self._regions = tuple(regions)
        self._threads = Threads(self.config.threads)
        await self._open_folder()

    async def _open_folder(self) -> None:
        try:
            loaded, boot = await self._pool.run(self._start)
            self._room = SlotAllocator(self._folder, self._index, self._keys, self._pool, loaded.next_number, boot)
            await self._room.enforce_cap()
        except OSError as error:
            raise why_not("file", self._folder, error) from None
        self._opened = True
        self._order_at = asyncio.get_running_loop().time() + _ORDER_EVERY_S

    async def _open_again(self) -> None:
        """Wait for running verbs; then make the folder that was removed again, empty."""
        while others := self._calls.keys() - {asyncio.current_task()}:
            await asyncio.wait(others)
        await self._pool.run(self._stop, self._order())
        try:
            await self._open_folder()
            self._removed = ""
        except (StoreUnavailable, StoreRejected) as error:
            # the next verb tries it again
            self._removed = f"{self._folder} was removed while it was open, and cannot be made again: {error}"

    def _start(self) -> tuple[Loaded, bytes]:
        """In a thread: take the lock and load; with syncs, bring the writes of an earlier process to the disk.

        The second value is the mark of segments before they are written to.
        """
        boot = boot_id()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = take_lock(self._folder, "file", self.config.max_nbytes)
        segment_nbytes = max(self.config.segment_nbytes, page_aligned(self.config.max_nbytes // _MAX_SEGMENTS))
        loaded = load(self._folder, self.config.max_nbytes, segment_nbytes, boot)
        self._index, self._next_sequence, self.damaged = loaded.index, loaded.next_sequence, loaded.damaged
        for segment in self._index.segments() if self._synced else ():
            if segment.believed:
                settle_segment(segment.fd, segment.shape)
                segment.boot = CLEAN
        return loaded, CLEAN if self._synced else boot

    async def aclose(self) -> None:
        self._closed = True
        while self._calls:
            await asyncio.wait(list(self._calls))
        threads, self._threads = self._threads, None
        if threads is not None:
            try:
                await threads.run(self._stop, self._order())
            finally:
                await threads.close()
        self._regions = ()

    def _stop(self, order: Order) -> None:
        """In a thread: write the order of use, bring everything to the disk, close everything."""
        segments = list(self._index.segments())
        try:
            if self._opened:
                with contextlib.suppress(OSError):  # a hint; without it, eviction goes by age
                    write_order(self._folder / ORDER_NAME, order)
            for segment in segments:
                if segment.boot != CLEAN and segment.believed:
                    with contextlib.suppress(OSError):  # it stays marked, and is not believed after loss of power
                        settle_segment(segment.fd, segment.shape)
        finally:
            for segment in segments:
                os.close(segment.fd)
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = -1
            self._index = FileIndex(0, 0)

    # -- verbs

    def beside(self, moves: Moves) -> bool:
        self._moves = moves
        return True

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        self._check_open()
        check_keys(keys, self.capabilities)
        for place, key in enumerate(keys):
            if self._index.get(key) is None:
                return place
        return len(keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_open()
        check_items(items, self.capabilities, self._regions)
        call = _Call()
        return await self._run(call, self._get(items, call))

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        self._check_open()
        check_items(items, self.capabilities, self._regions)
        call = _Call()
        return await self._run(call, self._put(items, call))

    async def delete(self, keys: Sequence[str]) -> int:
        self._check_open()
        check_keys(keys, self.capabilities)
        return await self._run(_Call(), self._delete(list(dict.fromkeys(keys))))

    async def usage(self) -> StoreUsage:
        self._check_open()
        return StoreUsage(objects=len(self._index), nbytes=self._index.nbytes)

    def check(self) -> None:
        """Raise InvariantBroken unless the index is consistent. For tests."""
        self._index.check()

    async def _get(self, items: Sequence[Item], call: _Call) -> list[Outcome]:
        outcomes = [MISS] * len(items)
        found: list[tuple[int, Entry]] = []
        for number, item in enumerate(items):
            entry = self._index.get(item.key)
            if entry is None:
                continue
            if entry.nbytes != item.nbytes:
                problem = f"{entry.nbytes} bytes are stored, {item.nbytes} were asked for"
                outcomes[number] = Outcome("damaged", problem)
                continue
            self._index.touch(entry)
            self._index.pin(entry)
            found.append((number, entry))
        found.sort(key=_by_place)
        try:
            moves = self._moves
            slots = [
                ReadSlot(fd=e.segment.fd, shape=e.segment.shape, slot=e.slot, item=items[n], moves=moves)
                for n, e in found
            ]
            troubles = await self._pool.each(slots, lambda slot: read_slot(slot, call.is_stopped))
        finally:
            for _, entry in found:
                self._unpin(entry)
        for (number, _), trouble in zip(found, troubles, strict=True):
            outcomes[number] = DONE if trouble is None else trouble.outcome()
        return outcomes

    async def _put(self, items: Sequence[Item], call: _Call) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        todo = list(range(len(items)))
        while todo:
            places: dict[int, Place] = {}
            claimed: list[str] = []
            later: list[int] = []
            others: list[asyncio.Future[None]] = []
            try:
                for number in todo:
                    key = items[number].key
                    entry = self._index.get(key)
                    if entry is not None:
                        self._index.touch(entry)
                        outcomes[number] = EXISTS
                    elif busy := self._keys.others([key]):
                        later.append(number)
                        others += busy
                    elif call.stopped:
                        outcomes[number] = _WENT_AWAY
                    else:
                        self._keys.claim(key)
                        claimed.append(key)
                        place = await self._room.place(items[number].nbytes)
                        if isinstance(place, Place):
                            places[number] = place
                            if place.evicted is not None:
                                self._keys.claim(place.evicted.key)
                                claimed.append(place.evicted.key)
                        elif place.status == "full" and places:
                            # this call's own items take the room: once they are written, they may be evicted
                            later.append(number)
                            self._keys.release(claimed.pop())
                        else:
                            outcomes[number] = place
                written = await self._write(items, places, call)
                for number, place in places.items():
                    outcomes[number] = self._settle(place, items[number], *written[number])
            finally:
                for number, place in places.items():
                    if number not in outcomes:
                        self._index.give_back(place, stale=True, kept=False)
                for key in claimed:
                    self._keys.release(key)
            if others:
                await asyncio.wait(others)
            todo = later
        return [outcomes[number] for number in range(len(items))]

    async def _write(
        self, items: Sequence[Item], places: dict[int, Place], call: _Call
    ) -> dict[int, tuple[Record, Written]]:
        """Write items to the slots claimed for them."""
        now_ns = time.time_ns()
        records = {}
        for number in places:
            records[number] = Record(items[number].key, items[number].nbytes, self._next_sequence, now_ns)
            self._next_sequence += 1
        numbers = sorted(places, key=lambda number: (places[number].segment.shape.number, places[number].slot))
        slots = []
        for number in numbers:
            place = places[number]
            fd, shape = place.segment.fd, place.segment.shape
            slots.append(
                WriteSlot(
                    fd=fd,
                    shape=shape,
                    slot=place.slot,
                    stale=place.stale,
                    record=records[number],
                    item=items[number],
                    moves=self._moves,
                )
            )
        try:
            await self._room.mark(places[number].segment for number in numbers)
        except OSError as error:
            results = [Written(IoError.of(error), slot.stale, kept=True) for slot in slots]
        else:
            if self._synced:
                # together, so that they share syncs
                results = await self._pool.spread(slots, lambda some: write_slots(some, call.is_stopped, synced=True))
            else:
                runs = runs_of(slots, _RUN)
                written = await self._pool.each(runs, lambda run: write_slots(run, call.is_stopped, synced=False))
                results = [result for run in written for result in run]
        return {number: (records[number], result) for number, result in zip(numbers, results, strict=True)}

    def _settle(self, place: Place, item: Item, record: Record, written: Written) -> Outcome:
        """Index one item of a put, or give its slot back; its outcome."""
        if written.skipped or written.trouble is not None:
            self._index.give_back(place, stale=written.stale, kept=written.kept)
            return _WENT_AWAY if written.trouble is None else written.trouble.outcome()
        self._index.add(Entry(item.key, place.segment, place.slot, item.nbytes, record.sequence, record.written_ns))
        return DONE

    async def _delete(self, keys: list[str]) -> int:
        while busy := self._keys.others(keys):
            await asyncio.wait(busy)
        found = [entry for key in keys if (entry := self._index.get(key)) is not None]
        for entry in found:
            self._keys.claim(entry.key)
            self._index.pin(entry)
            self._index.forget(entry)
        slots = [(entry.segment.fd, entry.segment.shape, entry.slot) for entry in found]
        troubles: list[IoError | None] = []
        try:
            troubles = await self._pool.run(lambda: clear_slots(slots, synced=self._synced))
        finally:
            for entry, trouble in zip(found, troubles or [None] * len(found), strict=True):
                if trouble is not None:
                    self._index.restore(entry)
                self._unpin(entry)
                self._keys.release(entry.key)
        failed = [trouble for trouble in troubles if trouble is not None]
        if failed:
            raise StoreUnavailable("file", f"{len(failed)} of {len(found)} objects were not deleted: {failed[0].words}")
        return len(found)

    # -- what verbs share

    @property
    def _pool(self) -> Threads:
        if self._threads is None:
            raise StoreUnavailable("file", "it is closed")
        return self._threads

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("file", "it is closed")
        # asking about an open file does not block
        if self._opened and not os.fstat(self._lock_fd).st_nlink:
            self._opened = False
            self._removed = f"{self._folder} was removed while it was open; it is made again, empty"
        if self._removed and (self._again is None or self._again.done()):
            self._again = asyncio.get_running_loop().create_task(self._open_again())
            self._calls[self._again] = _Call()
            self._again.add_done_callback(self._calls.pop)
        if not self._opened:
            raise StoreUnavailable("file", self._removed or "it is not open")

    async def _run(self, call: _Call, work: Coroutine[Any, Any, T]) -> T:
        """A verb's work in a task that is never cancelled: it leaves the index consistent even if the caller is."""
        task = asyncio.get_running_loop().create_task(work)
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            call.stopped = True
            with contextlib.suppress(Exception):  # the caller gets its cancellation
                await finish(task)
            raise
        self._remember_order()
        return task.result()  # of a task that is done

    def _remember_order(self) -> None:
        """Write the order of use every so often, in a task of its own; a crash loses only the order since then."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        if started < self._order_at or self._closed:
            return
        self._order_at = float("inf")
        path, order = self._folder / ORDER_NAME, self._order()

        async def write() -> None:
            try:
                with contextlib.suppress(OSError):
                    await self._pool.run(write_order, path, order)
            finally:
                self._order_at = loop.time() + max(_ORDER_EVERY_S, _ORDER_SHARE * (loop.time() - started))

        task = loop.create_task(write())
        self._calls[task] = _Call()
        task.add_done_callback(self._calls.pop)

    def _order(self) -> Order:
        return Order(self._next_sequence, [entry.sequence for entry in self._index.entries()])

    def _views(self, item: Item) -> list[memoryview]:
        return [self._regions[part.region].view(part.offset, part.nbytes) for part in item.parts]

    def _unpin(self, entry: Entry) -> None:
        if self._index.unpin(entry):
            self._index.release(entry.segment, entry.slot, stale=False)


def _check_path(path: str) -> None:
    """Raises StoreRejected for a path that can name no folder on any system."""
    problem = ""
    if not path:
        # pathlib takes it for the current folder
        problem = "path is empty"
    elif "\0" in path:
        problem = f"path {path!r} has a NUL character"
    else:
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            problem = f"path {path!r} cannot be written as a name"
    if problem:
        raise StoreRejected("file", problem, "name a folder, or a place for one, that this process may write to")


def _by_place(found: tuple[int, Entry]) -> tuple[int, int]:
    return found[1].segment.shape.number, found[1].slot
