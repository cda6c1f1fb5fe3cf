"""The sender of `benchmarks/fleet/transport_bench.py`: blocks in shared memory, behind transports and a raw socket.

    python -m benchmarks.fleet.transport_sender HOST COUNT NBYTES TRANSPORT...

It announces them in one line. A process that it forks before any loop runs answers raw requests with plain `sendall`
from the same memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import msgspec
import numpy as np
import uvloop
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import Transport, checksum_parts
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport
from fdasync_fleet.transfer.tcp import TcpTransport

from benchmarks.lib.child import stay
from fdasync.ipc.child import die_with_parent
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion

LOOPBACK = "127.0.0.1"
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


def transport_of(name: str, host: str = LOOPBACK) -> Transport:
    """`tls` is tcp with TLS; beyond the loopback tcp has keys."""
    if name in ("tcp", "tls"):
        return TcpTransport(host, keyed=host != LOOPBACK, tls=name == "tls")
    return make_transport(TransportSpec(name))


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


def serve_raw(listener: socket.socket, regions: list[SharedRegion], blocks: list[tuple[Part, Part]]) -> None:
    """Answer every byte that a client sends with all blocks. Never returns."""
    views = [regions[part.region].view(part.offset, part.nbytes) for parts in blocks for part in parts]
    while True:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while sock.recv(1):
                for view in views:
                    sock.sendall(view)


async def serve(
    regions: list[SharedRegion], blocks: list[tuple[Part, Part]], raw_port: int, transports: dict[str, Transport]
) -> None:
    for transport in transports.values():
        await transport.open(regions)
        for parts in blocks:
            transport.offer(parts)
    sources = {name: transport.source() for name, transport in transports.items()}
    checksums = [await checksum_parts(regions, parts) for parts in blocks]
    await stay(msgspec.json.encode(Announcement(sources, raw_port, checksums)).decode())


def main() -> None:
    die_with_parent()
    host, count, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    regions = regions_of(count, nbytes)
    blocks = [parts_of(number, nbytes) for number in range(count)]
    rng = np.random.default_rng(7)
    for region in regions:
        region.view()[:] = rng.bytes(region.nbytes)
    listener = socket.create_server((host, 0))
    if not os.fork():
        die_with_parent()
        serve_raw(listener, regions, blocks)
    port = listener.getsockname()[1]
    listener.close()
    uvloop.run(serve(regions, blocks, port, {name: transport_of(name, host) for name in sys.argv[4:]}))


if __name__ == "__main__":
    main()
