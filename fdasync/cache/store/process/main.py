"""The process that hosts a store: performs an engine's calls on a loop of its own, all at the same time.

Whatever the store does here (block, start threads, hold the GIL, crash), the engine's loop goes on. Memory is shared
by fd: no byte of a block is sent. Dies with the engine's process; when the channel ends in any other way it closes the
store and exits. Started by `process/proxy.py`, talks in `process/messages.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.checked import Sealed
from fdasync.cache.store.process.messages import (
    Answer,
    Call,
    Cancel,
    Close,
    Count,
    Delete,
    ExistsPrefix,
    GetInto,
    Open,
    Opened,
    Outcomes,
    Put,
    Refused,
    Stopped,
    ToHost,
    Used,
    pack_error,
)
from fdasync.errors import ProtocolError, StoreUnavailable
from fdasync.ipc.channel import Channel
from fdasync.ipc.child import die_with_parent, settle
from fdasync.ipc.shared_memory import SharedRegion
from fdasync.registry.registry import Registry

if TYPE_CHECKING:
    from fdasync.cache.store.base import Store


class _Host:
    """One store, one engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._ended: asyncio.Future[None] = loop.create_future()
        self._error: Exception | None = None
        self._decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
        self._encoder = msgspec.msgpack.Encoder()
        self._store: Store | None = None
        self._name = ""
        self._regions: list[SharedRegion] = []
        self._opening: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Task[Answer]] = {}
        self._cancelled: set[int] = set()
        self._channel = Channel(loop, sock, self._on_frame, self._end)

    async def serve(self) -> None:
        """Until the engine closes or its end of the channel is gone.

        Raises what broke the channel: it goes to stderr and into the exit status, which the engine tells.
        """
        await self._ended
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._store is not None:
            # running verbs end first: that is the store's to see to
            await self._store.aclose()
        if self._calls:
            await asyncio.wait(self._calls.values())
        # their answers are sent by callbacks that this turn of the loop may still owe
        await asyncio.sleep(0)
        self._channel.close()
        for region in self._regions:
            region.close()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        """Raises for what an engine never sends: that ends the channel, and with it this process."""
        message = self._decoder.decode(payload)
        if isinstance(message, Open):
            self._name = message.store
            self._opening = self._loop.create_task(self._open(message, fds))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Close):
            self._end(None)
        elif isinstance(message, Cancel):
            # a call that has ended meanwhile was answered
            task = self._calls.get(message.number)
            if task is not None:
                self._cancelled.add(message.number)
                task.cancel()
        elif self._store is None or message.number in self._calls:
            raise ProtocolError(f"the engine sent call {message.number} before the store was open, or twice")
        else:
            task = self._loop.create_task(self._perform(self._store, message))
            self._calls[message.number] = task
            task.add_done_callback(partial(self._answer, message.number))

    def _end(self, error: Exception | None) -> None:
        self._error = self._error or error
        if not self._ended.done():
            self._ended.set_result(None)

    async def _open(self, message: Open, fds: list[int]) -> None:
        try:
            if len(fds) != len(message.region_nbytes):
                raise ProtocolError(f"{len(fds)} fds came for {len(message.region_nbytes)} regions")
            for fd, nbytes in zip(fds, message.region_nbytes, strict=True):
                self._regions.append(SharedRegion(fd, nbytes))
            store = Registry().make_store(message.store, message.config)
            # from now on it is closed, whether it opens or not
            self._store = store if message.schema is None else Sealed(store, message.schema)
            await self._store.open(self._regions)
            answer: Opened | Refused = Opened(self._store.capabilities)
            settle()
        except Exception as error:
            answer = pack_error(0, message.store, error)
        self._channel.send(self._encoder.encode(answer))

    async def _perform(self, store: Store, call: Call) -> Answer:
        if isinstance(call, ExistsPrefix):
            return Count(call.number, await store.exists_prefix(call.keys))
        if isinstance(call, GetInto):
            return Outcomes(call.number, await store.get_into(call.items))
        if isinstance(call, Put):
            return Outcomes(call.number, await store.put(call.items))
        if isinstance(call, Delete):
            return Count(call.number, await store.delete(call.keys))
        return Used(call.number, await store.usage())

    def _answer(self, number: int, task: asyncio.Task[Answer]) -> None:
        del self._calls[number]
        asked = number in self._cancelled
        self._cancelled.discard(number)
        answer: Answer | Stopped | Refused
        if task.cancelled():
            answer = Stopped(number)
            if not asked:
                answer = pack_error(number, self._name, StoreUnavailable(self._name, "it cancelled its own call"))
        elif (error := task.exception()) is not None:
            answer = pack_error(number, self._name, error)
        else:
            answer = task.result()  # of a task that is done
        try:
            payload = self._encoder.encode(answer)
        except (TypeError, ValueError, OverflowError) as error:
            payload = self._encoder.encode(pack_error(number, self._name, error))
        self._channel.send(payload)


def main() -> None:
    """The child: its end of the channel is the fd in argv[1]; host one store, then exit."""
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    import uvloop

    async def run() -> None:
        await _Host(asyncio.get_running_loop(), sock).serve()

    uvloop.run(run())
