"""A sender and a receiver of a transport. Used by `transports`."""

from __future__ import annotations

import asyncio
import base64
import mmap
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import xxhash
from fdasync_fleet.transfer.base import CopySpec

from benchmarks.fleet.transport_sender import ROWS_NBYTES, Announcement, parts_of, regions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.transfer.base import Transport


_RECEIVE_S = 60.0


class Bench:
    """The sender's process, the receiver's regions, and both raw arms."""

    def __init__(self, count: int, nbytes: int, extra: Sequence[str] = ()) -> None:
        """`extra`: transports of plugins that the sender has, too."""
        self.count, self.nbytes = count, nbytes
        self.moved_nbytes = count * (nbytes + ROWS_NBYTES)
        self.regions = regions_of(count, nbytes)
        command = [sys.executable, "-m", "benchmarks.fleet.transport_sender", str(count), str(nbytes), *extra]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.sender = msgspec.msgpack.decode(base64.b64decode(self._process.stdout.readline()), type=Announcement)
        parts = [parts_of(number, nbytes) for number in range(count)]
        self.copy_specs = [CopySpec(one, one, sums) for one, sums in zip(parts, self.sender.checksums, strict=True)]
        source = self.sender.sources["shm"]
        self._maps = []
        for fd, size in source.regions[:2]:
            opened = os.open(f"/proc/{source.pid}/fd/{fd}", os.O_RDONLY)
            self._maps.append(mmap.mmap(opened, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
            os.close(opened)
        self._sock = socket.create_connection(("127.0.0.1", self.sender.raw_port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        views = [memoryview(each) for each in self._maps]
        flat = [
            (part, sums[at])
            for one, sums in zip(parts, self.sender.checksums, strict=True)
            for at, part in enumerate(one)
        ]
        # of each part: source, destination, checksum
        self._raw = [
            (
                views[part.region][part.offset : part.offset + part.nbytes],
                self.regions[part.region].view(part.offset, part.nbytes),
                checksum,
            )
            for part, checksum in flat
        ]

    def spoil(self) -> None:
        """Overwrite the destination, so that a missing copy is seen."""
        for _, into, _ in self._raw:
            into[:: 64 << 10] = bytes(len(into[:: 64 << 10]))

    def raw_shm(self, slice_nbytes: int = 1 << 40) -> None:
        for from_, into, checksum in self._raw:
            whole = xxhash.xxh3_64()
            for at in range(0, len(into), slice_nbytes):
                piece = into[at : at + slice_nbytes]
                piece[:] = from_[at : at + slice_nbytes]
                whole.update(piece)
            if whole.intdigest() != checksum:
                raise RuntimeError("the raw arm did not bring the bytes")

    def raw_tcp(self) -> None:
        self._sock.sendall(b"x")
        for _, into, checksum in self._raw:
            at = 0
            while at < len(into):
                got = self._sock.recv_into(into[at:])
                if not got:
                    raise RuntimeError("the raw arm's other end is gone")
                at += got
            if xxhash.xxh3_64_intdigest(into) != checksum:
                raise RuntimeError("the raw arm did not bring the bytes")

    async def ours(self, transport: Transport, name: str = "") -> None:
        deadline = asyncio.get_running_loop().time() + _RECEIVE_S
        source = self.sender.sources[name or transport.name]
        outcomes = await transport.receive(source, self.copy_specs, deadline)
        bad = [outcome for outcome in outcomes if not outcome.ok]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(outcomes)} blocks did not come: {bad[0]}")

    def close(self) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._raw.clear()
        for region in self.regions:
            region.close()
