"""The child's side of `ipc/rpc.py`: a service that performs its parent's calls until the parent closes or dies.

It knows no contract and no process but its own. The programs of all child processes call it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from abc import ABC, abstractmethod
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec

from fdasync.errors import FdasyncError, ProtocolError
from fdasync.ipc.channel import Channel
from fdasync.ipc.child import die_with_parent, leave, start_quietly
from fdasync.ipc.remote import marked
from fdasync.ipc.rpc import Answer, Call, Cancel, Close, Stopped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from fdasync.ipc.errors import ErrorTable, Failed
    from fdasync.ipc.remote import Method


class Service(ABC):
    """The work of one kind of child: its own marked methods (`ipc/remote.py`), and those of other objects.

    Calls begin in the order sent and run at the same time: what a method does before it first waits is done before a
    later call begins.

    Attributes:
        serves: contracts that other objects of the service keep.
        errors: the errors that answers may carry.
    """

    serves: ClassVar[tuple[type, ...]] = ()
    errors: ClassVar[ErrorTable]

    def target(self, method: Method[Any]) -> object:  # noqa: ARG002 - for services that have other objects, too
        """The object that has this method."""
        return self

    def perform(self, method: Method[Any], message: Any, fds: list[int]) -> Awaitable[object]:
        """Begin a call; the awaitable ends with its value. One that is no task yet becomes one, behind those of earlier
        calls."""
        return self.performed(method, message, fds)

    async def performed(self, method: Method[Any], message: Any, fds: list[int]) -> object:
        """Call the method, and wait for its value."""
        value = method.call(self.target(method), message, fds)
        return await value if inspect.isawaitable(value) else value

    def error_of(self, message: Any, error: BaseException) -> FdasyncError:
        """The error that answers a failed call. A call that cancelled itself has failed, too."""
        if error in self.errors:
            assert isinstance(error, FdasyncError)
            return error
        return self.otherwise(message, f"{type(error).__name__}: {error}")

    @abstractmethod
    def otherwise(self, message: Any, problem: str) -> FdasyncError:
        """The error of the table that stands for one that is not in it."""

    @abstractmethod
    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """End, with these calls unanswered. Calls that are cancelled here get no answer.

        An error that this raises goes to stderr and into the exit status, which the parent reads.
        """


class _Server:
    """One service, one parent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, service: Service) -> None:
        self._loop = loop
        self._service = service
        self._ended: asyncio.Future[None] = loop.create_future()
        self._error: Exception | None = None
        methods = marked(*service.serves, type(service)).values()
        self._methods = {message: method for method in methods for message in method.messages}
        known: Any = reduce(or_, [*self._methods, Cancel, Close])
        self._decoder: msgspec.msgpack.Decoder[Call[Any]] = msgspec.msgpack.Decoder(Call[known])
        self._encoder = msgspec.msgpack.Encoder()
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._cancelled: set[int] = set()
        self._channel = Channel(loop, sock, self._on_frame, self._end)

    async def serve(self) -> None:
        """Serve until the parent closes or dies. Raises the error that broke the channel."""
        await self._ended
        await self._service.aclose(list(self._running.values()))
        # answers are sent by callbacks, which the loop may not have run yet
        await asyncio.sleep(0)
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        self._channel.close()

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        """Raises for a frame that a parent never sends: that ends the channel, and with it this process."""
        call = self._decoder.decode(payload)
        number, message = call.number, call.message
        if isinstance(message, Close):
            self._end(None)
        elif isinstance(message, Cancel):
            # a call that has ended meanwhile was answered
            work = self._running.get(number)
            if work is not None:
                self._cancelled.add(number)
                work.cancel()
        elif number in self._running:
            raise ProtocolError(f"call {number} came twice")
        else:
            work = self._begin(message, fds)
            self._running[number] = work
            work.add_done_callback(partial(self._answer, number, message, fds))

    def _begin(self, message: Any, fds: list[int]) -> asyncio.Future[Any]:
        try:
            return asyncio.ensure_future(self._service.perform(self._methods[type(message)], message, fds))
        except Exception as error:
            failed = self._loop.create_future()
            failed.set_exception(error)
            return failed

    def _end(self, error: Exception | None) -> None:
        self._error = self._error or error
        if not self._ended.done():
            self._ended.set_result(None)

    def _answer(self, number: int, message: object, fds: list[int], work: asyncio.Future[Any]) -> None:
        del self._running[number]
        for fd in fds:
            os.close(fd)
        cancelled = number in self._cancelled
        self._cancelled.discard(number)
        reply: Answer[Any] | Failed | Stopped
        if not work.cancelled():
            error = work.exception()
            reply = self._failed(number, message, error) if error else Answer(number, work.result())  # it is done
        elif self._ended.done():
            # the end of this process is the answer
            return
        elif cancelled:
            reply = Stopped(number)
        else:
            reply = self._failed(number, message, asyncio.CancelledError("it cancelled its own call"))
        try:
            payload = self._encoder.encode(reply)
        except (TypeError, ValueError, OverflowError) as error:
            payload = self._encoder.encode(self._failed(number, message, error))
        try:
            self._channel.send(payload)
        except ProtocolError as error:
            # larger than a frame may be
            self._channel.send(self._encoder.encode(self._failed(number, message, error)))

    def _failed(self, number: int, message: object, error: BaseException) -> Failed:
        return self._service.errors.pack(number, self._service.error_of(message, error))


def serve(service: Service) -> NoReturn:
    """A child's whole program: its end of the channel is the fd in argv[1]; serve one parent, then exit."""
    die_with_parent()
    start_quietly()
    sock = socket.socket(fileno=int(sys.argv[1]))
    import uvloop

    async def run() -> None:
        await _Server(asyncio.get_running_loop(), sock, service).serve()

    uvloop.run(run())
    leave(0)
