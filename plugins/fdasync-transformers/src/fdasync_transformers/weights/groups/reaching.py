"""Whether a trainer's store is there yet, without holding a loop up.

torch's own client blocks its thread while nobody listens, and without any limit before one that listens and says
nothing. So it is used only once somebody has answered: this module asks as that client does (a greeting, and a ping
that a store sends back) and takes any answer, also the end of the connection, since what is no store makes torch's
client fail at once. Knows no groups and no tensors. Called by `runner.py`.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.request import WeightsGroup

# of torch's TCPStore: a query to validate, its magic number, and a ping with a number that comes back
_GREETING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1)
_AGAIN_S = 0.1
# a store answers at once, and one whose machine is away is dialed anew
_ANSWER_S = 5.0


async def reach(group: WeightsGroup) -> None:
    """Return once somebody answers at the address of the group's store. Waits without a limit: its caller has one."""
    # a name that needs no look-up, which some loops leave to a thread
    address = "127.0.0.1" if group.address == "localhost" else group.address
    while True:
        # OSError: nobody listens, or the address is not known yet
        with suppress(OSError, TimeoutError):
            # bare deadline: another machine's store, whose silence is an answer
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(address, group.port)
                try:
                    writer.write(_GREETING)
                    await reader.read(1)
                    return
                finally:
                    writer.close()
        await asyncio.sleep(_AGAIN_S)
