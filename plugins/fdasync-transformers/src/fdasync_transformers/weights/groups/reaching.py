"""Whether a trainer's store is there yet, without holding a loop up.

torch's own client blocks its thread: if the other side is no store it dials anew until its limit and beyond, and if
that listens and says nothing it has no limit. So it is used only once a store has answered: this module asks as that
client does (a greeting, and a ping whose number a store sends back). A side that answers otherwise is no store, and is
refused. Knows no groups and no tensors. Called by `joined.py`.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from fdasync.errors import WeightsRejected

if TYPE_CHECKING:
    from fdasync.request import WeightsGroup

# of torch's TCPStore: a query to validate, its magic number, and a ping with a number that comes back
_PING = struct.pack("<I", 0x5A17C0DE)
_GREETING = struct.pack("<BIB", 0, 0x3C85F7CE, 13) + _PING
_AGAIN_S = 0.1
# a store answers at once, and one whose machine is away is dialed anew
_ANSWER_S = 5.0


async def reach(group: WeightsGroup) -> None:
    """Return once a store answers at the group's address. Waits without a limit: its caller has one. Raises
    WeightsRejected where somebody answers who is no store."""
    # a name that needs no look-up, which some loops leave to a thread
    address = "127.0.0.1" if group.address == "localhost" else group.address
    while True:
        # OSError: nobody listens, or the address is not known yet. EOFError: somebody hung up, as one does who passes
        # connections on to a store that is not there yet
        with suppress(OSError, EOFError, TimeoutError):
            # bare deadline: another machine's store, whose silence is an answer
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(address, group.port)
                try:
                    writer.write(_GREETING)
                    answer = await reader.readexactly(len(_PING))
                finally:
                    writer.close()
            if answer == _PING:
                return
            raise WeightsRejected(
                f"group {group.name!r}: what answers at {group.address}:{group.port} is no store of torch.distributed"
                f" (it says {answer!r}); give the address and port of the trainer's store"
            )
        await asyncio.sleep(_AGAIN_S)
