"""One process that hosts a store, as the engine sees it: opened once, asked any number of times, reaped.

However it ends, every call that it has not answered is answered here, and only after it was reaped: from then on it
writes to no shared memory. What it sends is checked against what was asked; anything else kills it. Started, and
started again, by `process/proxy.py`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.process.messages import (
    Answer,
    Cancel,
    Opened,
    Refused,
    Stopped,
    ToEngine,
    pack_error,
    unpack_error,
)
from fdasync.errors import ProtocolError, StoreUnavailable
from fdasync.ipc.child import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable


class HostChild:
    """One child process, from its start until it is reaped, and the calls that it has not answered.

    Attributes:
        opened: its answer to `Open`; a `Refused` if it ended before.
        ready: its store is open.
        ending: why it is being ended; "" while it is not.
        gone: done when it was reaped and every call has its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, on_gone: Callable[[str], None]) -> None:
        """Raises OSError if no process can be started."""
        self.ready = False
        self.ending = ""
        self.opened: asyncio.Future[Opened | Refused] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._name = name
        self._on_gone = on_gone
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._calls: dict[int, _Waiting] = {}
        self.process = ChildProcess(
            loop, f"{name} store", "fdasync.cache.store.process.main", self._on_frame, self._on_death
        )
        # the one place where calls fail: a killed child does not call `on_death`
        self.process.exited.add_done_callback(self._exited)

    async def ask(self, number: int, payload: bytes, fits: Callable[[Answer], bool]) -> Answer:
        """Send a call and wait until it is answered, also when cancelled: then the child is asked to stop it."""
        waiting = self._calls[number] = _Waiting(self._loop.create_future(), fits)
        self.process.send(payload)
        cancelled: asyncio.CancelledError | None = None
        while not waiting.answer.done():
            try:
                await asyncio.wait([waiting.answer])
            except asyncio.CancelledError as error:
                if not waiting.cancelled:
                    waiting.cancelled = True
                    self.process.send(msgspec.msgpack.encode(Cancel(number)))
                cancelled = error
        if cancelled is not None:
            # what came of it is nobody's any more
            raise cancelled
        answer = waiting.answer.result()  # of a future that is done
        if isinstance(answer, Refused):
            raise unpack_error(answer)
        assert not isinstance(answer, Stopped)
        return answer

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        """Raises ProtocolError for what is not allowed: the channel ends then, and the child is killed."""
        for fd in fds:
            os.close(fd)
        try:
            message = self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"the {self._name} store process sent what cannot be decoded: {error}") from None
        if isinstance(message, Refused):
            unpack_error(message)  # raises if it cannot be
        if isinstance(message, Opened) or (isinstance(message, Refused) and message.number == 0):
            if self.opened.done():
                raise ProtocolError(f"the {self._name} store process opened its store twice")
            self.opened.set_result(message)
            return
        waiting = self._calls.get(message.number)
        if waiting is None:
            raise ProtocolError(f"the {self._name} store process answered call {message.number}, and nobody asked")
        if isinstance(message, Stopped):
            fits = waiting.cancelled
        else:
            fits = isinstance(message, Refused) or waiting.fits(message)
        if not fits:
            raise ProtocolError(f"the {self._name} store process answered a call with an odd {type(message).__name__}")
        del self._calls[message.number]
        waiting.answer.set_result(message)

    def _on_death(self, error: Exception) -> None:
        self.ending = self.ending or str(error)

    def _exited(self, _exited: asyncio.Future[int]) -> None:
        """It is reaped, so nothing writes to the regions any more: what it owes is answered here."""
        why = self.ending or "its process was ended"
        error = StoreUnavailable(self._name, why)
        self._on_gone(why)
        if not self.opened.done():
            self.opened.set_result(pack_error(0, self._name, error))
        for number, waiting in self._calls.items():
            waiting.answer.set_result(pack_error(number, self._name, error))
        self._calls.clear()
        self.gone.set_result(None)


class _Waiting:
    """A call that was sent."""

    def __init__(self, answer: asyncio.Future[Answer | Stopped | Refused], fits: Callable[[Answer], bool]) -> None:
        self.answer = answer
        self.fits = fits
        self.cancelled = False
