"""One host of `benchmarks/fleet/network.py`: blocks behind a tcp transport and a raw socket, or the reader of both.

Called with `send HOST COUNT NBYTES` it announces itself in a line and serves until its standard input ends. Called with
`receive HOST PAIRS ANNOUNCEMENT` it prints seconds of both arms, in turn.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import socket
import sys
import time

import msgspec
import uvloop
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import CopySpec, checksum_parts
from fdasync_fleet.transfer.tcp import TcpTransport

from benchmarks.fleet.transport_sender import parts_of, regions_of

_LIMIT_S = 120.0


class Announcement(msgspec.Struct):
    """What the sender says: its source, the raw socket's port, and the blocks."""

    source: Source
    raw_port: int
    count: int
    nbytes: int
    checksums: list[tuple[int, ...]]


async def send(host: str, count: int, nbytes: int) -> None:
    regions = regions_of(count, nbytes)
    regions[0].view()[:] = random.Random(7).randbytes(regions[0].nbytes)
    blocks = [parts_of(number, nbytes) for number in range(count)]
    transport = TcpTransport(host, keyed=True)
    await transport.open(regions)
    for parts in blocks:
        transport.offer(parts)
    whole = [regions[part.region].view(part.offset, part.nbytes) for parts in blocks for part in parts]

    async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1):
                for view in whole:
                    writer.write(view)
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(raw, host, 0)
    sums = [await checksum_parts(regions, parts) for parts in blocks]
    port = server.sockets[0].getsockname()[1]
    told = Announcement(transport.source(), port, count, nbytes, sums)
    print(base64.b64encode(msgspec.msgpack.encode(told)).decode(), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()
    server.close()
    await transport.aclose()


async def receive(host: str, pairs: int, sender: Announcement) -> None:
    regions = regions_of(sender.count, sender.nbytes)
    parts = [parts_of(number, sender.nbytes) for number in range(sender.count)]
    copy_specs = [CopySpec(one, one, sums) for one, sums in zip(parts, sender.checksums, strict=True)]
    total = sum(part.nbytes for one in parts for part in one)
    transport = TcpTransport(host, keyed=True, stuck_s=_LIMIT_S)
    await transport.open(regions)
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, (sender.source.address.rpartition(":")[0], sender.raw_port))
    into = bytearray(1 << 18)
    times: dict[str, list[float]] = {"ours": [], "raw": []}
    for round_ in range(1 + pairs):
        for arm in ("ours", "raw") if round_ % 2 else ("raw", "ours"):
            began = time.perf_counter()
            if arm == "ours":
                outcomes = await transport.receive(sender.source, copy_specs, loop.time() + _LIMIT_S)
                assert all(outcome.ok for outcome in outcomes), outcomes
            else:
                await loop.sock_sendall(sock, b"x")
                left = total
                while left:
                    left -= await loop.sock_recv_into(sock, memoryview(into)[: min(left, len(into))])
            if round_:
                times[arm].append(time.perf_counter() - began)
    sock.close()
    await transport.aclose()
    print(json.dumps({"times": times, "nbytes": total}), flush=True)


def main() -> None:
    what, host, *others = sys.argv[1:]
    if what == "send":
        uvloop.run(send(host, int(others[0]), int(others[1])))
    else:
        told = msgspec.msgpack.decode(base64.b64decode(others[1]), type=Announcement)
        uvloop.run(receive(host, int(others[0]), told))


if __name__ == "__main__":
    main()
