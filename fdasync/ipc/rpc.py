"""Numbered calls to a child process: the messages on the channel, and the parent's side of it.

The parent calls methods of a contract (`ipc/remote.py`), each under a number; the child performs them
(`ipc/service.py`) and answers each number once: with a value, with an error by class and fields, or with the word that
it stopped. A wait for an answer may end before the work: the call stays known until it is answered. The end of the
child fails every call that is left, and only after the child was reaped: from then on it writes to no shared memory.
This module knows no contract. The parents of all child processes call it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import msgspec

from fdasync.errors import ProtocolError, RunnerError
from fdasync.ipc.child import ChildProcess
from fdasync.ipc.errors import ErrorTable, Failed
from fdasync.ipc.remote import Method, method_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

P = ParamSpec("P")
T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """To the child: perform a message.

    Attributes:
        number: of the call, from 1; of a `Cancel` the number of the call to stop; 0 of a `Close`.
        message: the message.
    """

    number: int
    message: T


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The parent has no use for this call any more; the child stops it if it can, and answers it all the same."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """End; the end of the stream means the same."""


class Answer(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag="answer"):
    """To the parent: the call was performed.

    Attributes:
        number: of the call.
        value: its result.
    """

    number: int
    value: T


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """To the parent: the call ended because it was cancelled.

    Attributes:
        number: of the call.
    """

    number: int


class RpcClient:
    """One child process from its start until it is reaped, and the calls that it has not answered.

    Args:
        name: the child's purpose in words; part of errors.
        module: its `main` is the child's whole program.
        errors: the errors that its answers may carry.
        environment: variables that the child has beside this process's own, or instead of them.

    Attributes:
        process: the child.
        ending: the error that ends or has ended the child, raised by its calls from then on; None while it serves.
        gone: done, with `ending`, when the child was reaped; calls that are left fail then.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        module: str,
        errors: ErrorTable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises OSError if no process can be started; then none is left."""
        self.ending: Exception | None = None
        self.gone: asyncio.Future[Exception] = loop.create_future()
        self._loop = loop
        self._name = name
        self._errors = errors
        self._number = 0
        # by number: the future, what was called, and with what
        self._calls: dict[int, tuple[asyncio.Future[Any], Method[Any], msgspec.Struct]] = {}
        self._cancelled: set[int] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer[msgspec.Raw] | Failed | Stopped)
        self.process = ChildProcess(loop, name, module, self._on_frame, self._on_death, environment)
        # the one place where calls fail: a killed child does not call `on_death`
        self.process.exited.add_done_callback(self._reaped)

    @property
    def unanswered(self) -> int:
        """How many calls have no answer, those included that no caller waits for any more."""
        return len(self._calls)

    def call(
        self, function: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Call a marked method; the future ends with its answer. Cancelling the future stops the waiting only.

        An answer that cannot be decoded, or does not fit the call, breaks the protocol: the child is killed. Raises
        TypeError, ValueError or OverflowError for arguments that cannot be encoded, ProtocolError for a message that is
        too large, RunnerError where no descriptor is left for a copy of the caller's. A child that is ending is sent
        nothing: the future fails when the child is gone.
        """
        return self.send(method_of(function), args, kwargs)

    def tell(
        self, function: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[None]:
        """As `call`, of a method that returns nothing at once."""
        return self.send(method_of(function), args, kwargs)

    def send(self, method: Method[T], args: Sequence[Any], kwargs: dict[str, Any]) -> asyncio.Future[T]:
        """As `call`."""
        answer: asyncio.Future[T] = self._loop.create_future()
        if self.gone.done():
            _fail(answer, self.gone.result())  # it is done
            return answer
        message, fds = method.pack(args, kwargs)
        number = self._number + 1
        if self.ending is None:
            payload = self._encoder.encode(Call(number, message))
            try:
                self.process.channel.send(payload, fds)
            except OSError as error:
                raise RunnerError(f"a call cannot be sent to the {self._name} process: {error.strerror}") from error
        # a call to a child that is ending fails with all others: never before the owner has learned of the end
        self._number = number
        self._calls[number] = answer, method, message
        return answer

    async def ask(self, function: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and wait for the answer, even when cancelled; then the child is asked, once, to stop the call."""
        return await self.ask_for(method_of(function), args, kwargs)

    async def ask_for(self, method: Method[T], args: Sequence[Any], kwargs: dict[str, Any]) -> T:
        """As `ask`."""
        answer = self.send(method, args, kwargs)
        number = self._number
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait([answer])
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self._cancelled.add(number)
                    self.process.send(self._encoder.encode(Call(number, Cancel())))
                cancelled = error
        self._cancelled.discard(number)
        if cancelled is not None:
            raise cancelled
        try:
            return answer.result()  # of a future that is done
        finally:
            # an error that is raised here refers to this frame: with the future in it that would be a cycle
            del answer

    async def close(self, why: Exception, deadline_s: float) -> None:
        """Ask the child to end, kill it at the deadline; idempotent. Reaped on return; unanswered calls raise `why`."""
        self.ending = self.ending or why
        await self.process.close(self._encoder.encode(Call(0, Close())), deadline_s)
        await asyncio.wait([self.gone])

    async def kill(self, why: Exception) -> None:
        """SIGKILL and reap; idempotent. Then unanswered calls raise `why`.

        Raises DeadlineExceeded if the kernel does not let go of the process: the calls end when it does.
        """
        self.ending = self.ending or why
        await self.process.kill()
        await asyncio.wait([self.gone])

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        """Raises ProtocolError for a frame that is not allowed: the channel ends then, and the child is killed."""
        for fd in fds:
            os.close(fd)
        try:
            message = self._decoder.decode(payload)
            number = message.number
            call = self._calls.get(number)
            if call is None:
                raise ProtocolError(f"the {self._name} process answered call {number}, which was not made")
            answer, method, asked = call
            value = method.answer.decode(message.value) if isinstance(message, Answer) else message
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"the {self._name} process sent what cannot be decoded: {error}") from None
        if isinstance(message, Answer):
            fit = method.fits(value, asked)
            if fit and not answer.done():
                answer.set_result(value)
        elif isinstance(message, Failed):
            fit = True
            _fail(answer, self._errors.unpack(message))
        else:
            fit = number in self._cancelled and answer.cancel()
        if not fit:
            raise ProtocolError(f"the {self._name} process answered a call with an odd {type(value).__name__}")
        del self._calls[number]

    def _on_death(self, error: Exception) -> None:
        self.ending = self.ending or error

    def _reaped(self, _exited: asyncio.Future[int]) -> None:
        assert self.ending is not None
        # first, so that the owner learns of the end before any of its callers does
        self.gone.set_result(self.ending)
        for answer, _, _ in self._calls.values():
            _fail(answer, self.ending)
        self._calls.clear()


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        # retrieved, so that asyncio does not warn of an answer that no caller reads
        answer.exception()
