"""A sender in a process of its own: it offers blocks until its standard input ends.

It announces them in one line on its standard output. Run as `python -m`, by `SenderProcess` only.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import sys

import msgspec
import uvloop

from fdasync.ipc.child import die_with_parent
from fdasync_fleet.testing.transports.harness import Side, TransportHooks
from fdasync_fleet.testing.transports.processes import Announcement


async def serve(factory: str, count: int, sizes: list[int], overwrites: bool) -> None:
    """Offer blocks until standard input ends."""
    module, _, name = factory.partition(":")
    side = Side(getattr(importlib.import_module(module), name)(), TransportHooks(), 99)
    await side.transport.open(side.regions)
    blocks = [side.block(number, *sizes) for number in range(count)]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    line = base64.b64encode(msgspec.msgpack.encode(Announcement(side.source, blocks))) + b"\n"
    os.set_blocking(sys.stdout.fileno(), True)
    os.write(sys.stdout.fileno(), line)  # blocking: the parent waits for this line
    flip = 0xFF
    while not ended.is_set():
        await asyncio.sleep(0 if overwrites else 0.05)
        for parts, _ in blocks if overwrites else []:
            for part in parts:
                view = side.regions[part.region].view(part.offset, part.nbytes)
                # a byte at the end, so that a reader in the middle may see both
                view[-1] ^= flip
    await side.close()


def main() -> None:
    die_with_parent()
    factory, count, sizes, overwrites = sys.argv[1:]
    uvloop.run(serve(factory, int(count), [int(size) for size in sizes.split(",")], overwrites == "1"))


if __name__ == "__main__":
    main()
