"""The other process of `benchmarks/fleet/transports.py`: blocks in shared memory, behind transports and a raw socket.

It announces them in one line, then serves until its standard input ends. A process that it forks before any loop runs
answers raw requests with plain `sendall` from the same memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import socket
import sys

import msgspec
import uvloop
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import Transport, checksum_parts
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport
from fdasync_fleet.transfer.shm import ShmTransport
from fdasync_fleet.transfer.tcp import TcpTransport

from fdasync.ipc.child import die_with_parent
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion

# 48 layers x top-8 x 16 tokens, a byte each
ROWS_NBYTES = 48 * 8 * 16


class Announcement(msgspec.Struct):
    """What the sender writes when it is ready.

    Attributes:
        sources: of its transports, by name.
        raw_port: of the raw socket.
        checksums: of the parts of each block.
    """

    sources: dict[str, Source]
    raw_port: int
    checksums: list[tuple[int, ...]]


def regions_of(count: int, nbytes: int) -> list[SharedRegion]:
    """Regions laid out as an engine's, every page touched: header pages and KV in one, rows in the other."""
    regions = [
        SharedRegion.create("host", count * (PAGE_NBYTES + nbytes)),
        SharedRegion.create("aux", count * ROWS_NBYTES + PAGE_NBYTES),
    ]
    for region in regions:
        region.view()[::PAGE_NBYTES] = bytes(len(region.view()[::PAGE_NBYTES]))
    return regions


def parts_of(number: int, nbytes: int) -> tuple[Part, Part]:
    """KV and rows of a block."""
    stride = PAGE_NBYTES + nbytes
    return Part(0, number * stride + PAGE_NBYTES, nbytes), Part(1, number * ROWS_NBYTES, ROWS_NBYTES)


def serve_raw(listener: socket.socket, regions: list[SharedRegion], count: int, nbytes: int) -> None:
    """Answer every byte that a client sends with all blocks. Never returns."""
    views = [regions[part.region].view(part.offset, part.nbytes) for n in range(count) for part in parts_of(n, nbytes)]
    while True:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while sock.recv(1):
                for view in views:
                    sock.sendall(view)


async def serve(regions: list[SharedRegion], port: int, count: int, nbytes: int, extra: list[str]) -> None:
    blocks = [parts_of(number, nbytes) for number in range(count)]
    transports: dict[str, Transport] = {"shm": ShmTransport(), "tcp": TcpTransport(), "tls": TcpTransport(tls=True)}
    transports |= {name: make_transport(TransportSpec(name)) for name in extra}
    for transport in transports.values():
        await transport.open(regions)
        for parts in blocks:
            transport.offer(parts)
    announcement = Announcement(
        {name: transport.source() for name, transport in transports.items()},
        port,
        [await checksum_parts(regions, parts) for parts in blocks],
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    sys.stdout.write(base64.b64encode(msgspec.msgpack.encode(announcement)).decode() + "\n")
    sys.stdout.flush()
    await ended.wait()
    for transport in transports.values():
        await transport.aclose()


def main() -> None:
    die_with_parent()
    count, nbytes = int(sys.argv[1]), int(sys.argv[2])
    regions = regions_of(count, nbytes)
    rng = random.Random(7)
    for region in regions:
        view = region.view()
        for at in range(0, len(view), 1 << 20):
            piece = view[at : at + (1 << 20)]
            piece[:] = rng.randbytes(len(piece))
    listener = socket.create_server(("127.0.0.1", 0))
    if not os.fork():
        die_with_parent()
        serve_raw(listener, regions, count, nbytes)
    port = listener.getsockname()[1]
    listener.close()
    uvloop.run(serve(regions, port, count, nbytes, sys.argv[3:]))


if __name__ == "__main__":
    main()
