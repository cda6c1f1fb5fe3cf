"""A connection to a sender, by hand."""

from __future__ import annotations

import asyncio
import struct

from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer.tcp import TcpTransport
from fdasync_fleet.transfer.tcp_wire import (
    parse_address,
)

REPLY = struct.Struct("<QII")


class Hooks(TransportHooks):
    def make(self):
        return TcpTransport(stuck_s=0.3, idle_s=30.0)


async def dial(sender, data=b""):
    host, port = parse_address(sender.source.address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    return reader, writer


NONCE = bytes(range(16))
