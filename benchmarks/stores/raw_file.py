"""The raw limit of a file store: plain `pwritev` and `preadv` from a pool of threads, in a process of its own.

The same bytes in the same shared memory, the same segments of fixed slots (`file/layout.py`), reused in turn, the same
number of threads, one XXH3 of every section on each side. No index, no records, no crash safety, no object format.
Used by `stores.py`; as a module it is the process.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from benchmarks.lib.child import Child
from fdasync.cache.store.file.layout import Shape
from fdasync.ipc.child import die_with_parent
from fdasync.ipc.shared_memory import SharedRegion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.stores.tier import Blocks
    from fdasync.ipc.shared_memory import Part


class RawFiles(Child):
    """The process, as its parent sees it. Blocks.

    Args:
        folder: where the segments go; there and empty.
        blocks: the blocks to move; owned by the caller.
        shape: of the segments, whose numbers count from 0.
        segments: number of segments.
        threads: number of threads that read and write.
    """

    def __init__(self, folder: Path, blocks: Blocks, shape: Shape, segments: int, threads: int) -> None:
        host, numbers = blocks.host, range(blocks.count)
        fds = [region.fd for region in blocks.regions]
        # numbers of regions are places in `fds`
        setup = {
            "folder": str(folder),
            "fds": fds,
            "nbytes": [region.nbytes for region in blocks.regions],
            "write": [_numbers(blocks.object_parts(number, host.zeros(0))) for number in numbers],
            "read": [_numbers(blocks.object_parts(number, host.trash(0))) for number in numbers],
            "hashed": [_numbers(blocks.sections(number)) for number in numbers],
            "shape": [shape.stride, shape.slots],
            "segments": segments,
            "threads": threads,
        }
        super().__init__("benchmarks.stores.raw_file", fds=fds)
        self.ask(json.dumps(setup))

    def write(self) -> None:
        """Write every block to the slots that were used longest ago."""
        self.ask("write")

    def read(self) -> None:
        """Read the blocks of the last write back. Raises RuntimeError if a checksum differs."""
        self.ask("read")


def _numbers(parts: list[Part]) -> list[list[int]]:
    return [[part.region, part.offset, part.nbytes] for part in parts]


class _Slots:
    """The child's side: preallocated segments, and the blocks in them."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._regions = [SharedRegion(fd, nbytes) for fd, nbytes in zip(setup["fds"], setup["nbytes"], strict=True)]
        self._writes = [self._views(parts) for parts in setup["write"]]
        self._reads = [self._views(parts) for parts in setup["read"]]
        self._hashed = [self._views(parts) for parts in setup["hashed"]]
        self._sums: list[list[int]] = [[] for _ in self._hashed]
        self._threads: int = setup["threads"]
        self._pool = ThreadPoolExecutor(self._threads)
        self._places: list[tuple[int, int]] = []
        stride, slots = setup["shape"]
        for number in range(setup["segments"]):
            shape = Shape(stride, slots, number)
            fd = os.open(Path(setup["folder"]) / shape.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(fd, 0, shape.nbytes)
            self._places += [(fd, shape.value_at(slot)) for slot in range(shape.slots)]
        self._first = 0

    def write(self) -> None:
        self._first = (self._first + len(self._writes)) % len(self._places)
        self._all(self._write_some)

    def read(self) -> None:
        self._all(self._read_some)

    def _views(self, parts: list[list[int]]) -> list[memoryview]:
        return [self._regions[region].view(offset, nbytes) for region, offset, nbytes in parts]

    def _all(self, some: Callable[[Iterator[int]], None]) -> None:
        numbers = iter(range(len(self._writes)))
        for job in [self._pool.submit(some, numbers) for _ in range(self._threads)]:
            job.result()

    def _place(self, number: int) -> tuple[int, int]:
        return self._places[(self._first + number) % len(self._places)]

    def _write_some(self, numbers: Iterator[int]) -> None:
        # the threads share the iterator: each takes the next free block
        for number in numbers:
            self._sums[number] = self._sums_of(number)
            fd, offset = self._place(number)
            views = self._writes[number]
            if os.pwritev(fd, views, offset) != sum(view.nbytes for view in views):
                raise OSError("a short write")

    def _read_some(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            fd, offset = self._place(number)
            views = self._reads[number]
            if os.preadv(fd, views, offset) != sum(view.nbytes for view in views):
                raise OSError("a short read")
            if self._sums[number] != self._sums_of(number):
                raise ValueError("a checksum is wrong")

    def _sums_of(self, number: int) -> list[int]:
        return [xxhash.xxh3_64_intdigest(view) for view in self._hashed[number]]


def main() -> None:
    """The setup as JSON in a line, then a verb in each; answered by a word in a line."""
    die_with_parent()
    slots = _Slots(json.loads(sys.stdin.readline()))
    print("done", flush=True)
    for line in sys.stdin:
        {"write": slots.write, "read": slots.read}[line.strip()]()
        print("done", flush=True)


if __name__ == "__main__":
    main()
