"""What a router's knowledge of blocks takes in memory, in a process of its own.

`python -m benchmarks.fleet.scale_memory 512 20000 0.0` prints the bytes, and the CPU time for each block of news.

The news are real messages, encoded and decoded, of instances that have that share of their blocks in common with all
others; 0 is the worst case, in which no two instances have the same block.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec
from fdasync_fleet.messages import PROTOCOL, Facts, Hello, KvEventBatch, decode, encode
from fdasync_fleet.router.instances import InstanceTable

from benchmarks.fleet.scale_instance import NAMESPACE, VOCAB_SIZE, Pace, shape_of

_PAGE_KEYS = 2048


class _Peer:
    """What `InstanceHandle` reads of a peer."""

    def __init__(self, number: int) -> None:
        pace = Pace()
        facts = Facts("m", VOCAB_SIZE, 32_768, pace.num_blocks, (), 0, None, "", "", 8192, "0", 256)
        self.address, self.is_up, self.role, self.incarnation = f"i{number}", True, "mixed", bytes(16)
        self.hello = Hello(PROTOCOL, self.address, "mixed", self.address, shape_of(pace), (), NAMESPACE, facts)


class Memory(msgspec.Struct, frozen=True):
    """Attributes:
    nbytes: resident memory that all news took.
    block_us: CPU microseconds for each block of news, decoding included.
    lookup_us: CPU microseconds to follow a prompt of 80 blocks.
    longest_ms: CPU milliseconds of the message that took longest.
    """

    nbytes: int
    block_us: float
    lookup_us: float
    longest_ms: float


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(instances: int, blocks: int, common: float) -> Memory:
    rng = random.Random(0)
    table = InstanceTable()
    handles = [table.add(_Peer(number)) for number in range(instances)]  # type: ignore[arg-type]
    for handle in handles:
        handle.came_up()
    shared = [rng.randbytes(16) for _ in range(int(blocks * common))]
    before, spent_s, longest_s, count = resident_nbytes(), 0.0, 0.0, 0
    some: list[list[bytes]] = []
    for handle in handles:
        keys = shared + [rng.randbytes(16) for _ in range(blocks - len(shared))]
        if len(some) < 100:
            some.append(keys[-80:])
        for first in range(0, len(keys), _PAGE_KEYS):
            page = tuple(keys[first : first + _PAGE_KEYS])
            data = encode(KvEventBatch(NAMESPACE, "0", first == 0, page, ()))
            del page
            began = time.process_time()
            message = decode(data)
            assert isinstance(message, KvEventBatch)
            handle.learn(message)
            took_s = time.process_time() - began
            spent_s, longest_s = spent_s + took_s, max(longest_s, took_s)
        count += len(keys)
        del keys
    nbytes = resident_nbytes() - before
    began = time.process_time()
    for keys in some:
        table.index.prefixes(keys, table.loads.working)
    lookup_us = (time.process_time() - began) / len(some) * 1e6
    return Memory(nbytes, spent_s / count * 1e6, lookup_us, longest_s * 1e3)


if __name__ == "__main__":
    print(msgspec.json.encode(measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))).decode())
