"""Page cache or O_DIRECT, for blocks of a file store: `python -m benchmarks.file_modes [FOLDER]`.

Plain `pwritev` and `preadv` from a pool of threads into one preallocated file, both ways in turn; cold reads are made
cold with `posix_fadvise`, which needs no root. Not part of the package: it shows why the file store is as it is.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

BLOCKS, NBYTES, THREADS, ROUNDS = 256, 1 << 20, 2, 7


def once(folder: str, flags: int, views: list[memoryview]) -> tuple[float, float, float]:
    """Seconds to write all blocks, to read them, and to read them from the disk."""
    spent: list[float] = []
    with tempfile.NamedTemporaryFile(dir=folder) as file, ThreadPoolExecutor(THREADS) as pool:
        fd = os.open(file.name, os.O_RDWR | flags)
        try:
            os.posix_fallocate(fd, 0, BLOCKS * NBYTES)
            list(pool.map(lambda _: None, range(8 * THREADS)))
            for call in (os.pwritev, os.preadv, os.preadv):
                if len(spent) == 2:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                started = time.perf_counter()
                list(pool.map(lambda n, call=call: call(fd, [views[n]], n * NBYTES), range(BLOCKS)))
                spent.append(time.perf_counter() - started)
        finally:
            os.close(fd)
    return spent[0], spent[1], spent[2]


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    memory = mmap.mmap(-1, BLOCKS * NBYTES)  # page aligned, as O_DIRECT wants it
    memory.write(os.urandom(NBYTES) * BLOCKS)
    views = [memoryview(memory)[n * NBYTES : (n + 1) * NBYTES] for n in range(BLOCKS)]
    modes = {"page cache": 0, "O_DIRECT": os.O_DIRECT}
    spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in modes}
    for _ in range(ROUNDS):
        for name, flags in modes.items():
            spent[name].append(once(folder, flags, views))
    print(f"{BLOCKS} blocks of {NBYTES} bytes, {THREADS} threads, median of {ROUNDS} rounds, MB/s")
    print(f"{'':12}{'write':>10}{'read':>10}{'read cold':>12}")
    for name, rounds in spent.items():
        rates = [BLOCKS * NBYTES / 1e6 / statistics.median(times) for times in zip(*rounds, strict=True)]
        print(f"{name:12}{rates[0]:>10.0f}{rates[1]:>10.0f}{rates[2]:>12.0f}")


if __name__ == "__main__":
    main()
