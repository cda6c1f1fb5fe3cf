"""A receiver of blocks and the process that sends them, by transports and on raw paths.

All arms have the same memory on each side, touched before. Knows no figures. Used by `transports.py` and `network.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec
import xxhash
from fdasync_fleet.transfer.base import CopySpec

from benchmarks.fleet.transport_sender import LOOPBACK, ROWS_NBYTES, Announcement, parts_of, regions_of
from benchmarks.lib.child import Child

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from fdasync_fleet.transfer.base import Transport

WARM_ROUNDS = 2
_RECEIVE_S = 60.0


class Bench:
    """The sender's process, the receiver's regions, and both raw arms. `with` ends and closes them.

    Args:
        count, nbytes: blocks that move, and KV of each.
        names: transports of the sender besides shm.
        host: address of the sender.
        before: a command that runs the sender, such as nsenter.

    Attributes:
        moved_nbytes: KV and rows of all blocks.
    """

    def __init__(
        self, count: int, nbytes: int, names: Sequence[str], host: str = LOOPBACK, before: Sequence[str] = ()
    ) -> None:
        self.moved_nbytes = count * (nbytes + ROWS_NBYTES)
        self._regions = regions_of(count, nbytes)
        words = (host, str(count), str(nbytes), "shm", *names)
        self._process = Child("benchmarks.fleet.transport_sender", *words, before=before)
        self._sender = msgspec.json.decode(self._process.line(), type=Announcement)
        parts = [parts_of(number, nbytes) for number in range(count)]
        self._copy_specs = [CopySpec(one, one, sums) for one, sums in zip(parts, self._sender.checksums, strict=True)]
        source = self._sender.sources["shm"]
        self._maps = []
        for fd, size in source.regions[:2]:
            opened = os.open(f"/proc/{source.pid}/fd/{fd}", os.O_RDONLY)
            self._maps.append(mmap.mmap(opened, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
            os.close(opened)
        self._sock = socket.create_connection((host, self._sender.raw_port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # of each part: source, destination, checksum
        self._raw = [
            (
                memoryview(self._maps[part.region])[part.offset : part.offset + part.nbytes],
                self._regions[part.region].view(part.offset, part.nbytes),
                checksum,
            )
            for one, sums in zip(parts, self._sender.checksums, strict=True)
            for part, checksum in zip(one, sums, strict=True)
        ]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.close()
        self._raw.clear()
        for region in self._regions:
            region.close()

    def spoil(self) -> None:
        """Overwrite the destination, so that a missing copy is seen."""
        for _, into, _ in self._raw:
            into[:: 64 << 10] = bytes(len(into[:: 64 << 10]))

    def raw_shm(self) -> None:
        """Copy and hash each part. Blocks, as the other raw arm does."""
        for from_, into, checksum in self._raw:
            into[:] = from_
            _check(into, checksum)

    def raw_tcp(self) -> None:
        self._sock.sendall(b"x")
        for _, into, checksum in self._raw:
            at = 0
            while at < len(into):
                got = self._sock.recv_into(into[at:])
                if not got:
                    raise RuntimeError("the raw arm's other end is gone")
                at += got
            _check(into, checksum)

    async def ours(self, transport: Transport, name: str) -> None:
        """Receive by a transport whose name at the sender is this."""
        deadline = asyncio.get_running_loop().time() + _RECEIVE_S
        outcomes = await transport.receive(self._sender.sources[name], self._copy_specs, deadline)
        bad = [outcome for outcome in outcomes if not outcome.ok]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(outcomes)} blocks did not come: {bad[0]}")

    @contextlib.asynccontextmanager
    async def opened(self, *transports: Transport) -> AsyncIterator[None]:
        """In the body these transports can receive."""
        async with contextlib.AsyncExitStack() as stack:
            for transport in transports:
                await transport.open(self._regions)
                stack.push_async_callback(transport.aclose)
            yield

    async def in_turn(
        self, arms: dict[str, Callable[[], Awaitable[None] | None]], rounds: int
    ) -> dict[str, list[float]]:
        """Seconds of each arm, round by round; arms take turns to begin."""
        times: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(WARM_ROUNDS + rounds):
            for name in arms if round_ % 2 else reversed(arms):
                self.spoil()
                started = time.perf_counter()
                if (work := arms[name]()) is not None:
                    await work
                if round_ >= WARM_ROUNDS:
                    times[name].append(time.perf_counter() - started)
        return times


def _check(into: memoryview, checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(into) != checksum:
        raise RuntimeError("the raw arm did not bring the bytes")
