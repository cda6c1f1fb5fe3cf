"""What a router's knowledge of blocks takes in memory, in a process of its own.

`python -m benchmarks.fleet.scale_memory 512 20000` prints the bytes for 512 instances of 20,000 blocks.

The news are real messages, encoded and decoded. No two instances have the same block, which is the worst case. Run by
`fleet_scale.py`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from fdasync_fleet.messages import KvEventBatch, decode, encode
from fdasync_fleet.router.instances import InstanceTable

from benchmarks.fleet.scale_instance import NAMESPACE, hello_of

_PAGE_KEYS = 2048


class _Peer:
    """What `InstanceHandle` reads of a peer."""

    def __init__(self, number: int) -> None:
        self.address, self.is_up, self.role, self.incarnation = f"i{number}", True, "mixed", bytes(16)
        self.hello = hello_of(self.address, self.address)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(instances: int, blocks: int) -> int:
    """Resident memory that all news took."""
    rng = random.Random(0)
    table = InstanceTable()
    handles = [table.add(_Peer(number)) for number in range(instances)]
    for handle in handles:
        handle.came_up()
    before = resident_nbytes()
    for handle in handles:
        for first in range(0, blocks, _PAGE_KEYS):
            keys = tuple([rng.randbytes(16) for _ in range(first, min(first + _PAGE_KEYS, blocks))])
            data = encode(KvEventBatch(NAMESPACE, "0", first == 0, keys, ()))
            # the router has those of the message alone
            del keys
            message = decode(data)
            assert isinstance(message, KvEventBatch)
            handle.learn(message)
    return resident_nbytes() - before


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), int(sys.argv[2])))
