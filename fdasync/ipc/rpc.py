"""Numbered calls to a child process: the messages on the channel, and the parent's side of it.

The parent sends messages of its room, each under a number; the child performs them (`ipc/service.py`) and answers each
number once: with a value, with an error by class and fields, or with the word that it stopped. A wait for an answer may
end before the work: the call stays known until it is answered. The end of the child fails every call that is left, and
only after the child was reaped: from then on it writes to no shared memory. This module knows no message of any room.
The proxies of the store's process and of the worker, and the tokenizer's process, call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from fdasync.errors import FdasyncError, ProtocolError
from fdasync.ipc.child import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """To the parent: the call raised.

    Attributes:
        number: of the call.
        kind: name of the error's class.
        fields: its constructor's arguments.
    """

    number: int
    kind: str
    fields: dict[str, str | int | None]


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """To the parent: the call ended because it was cancelled.

    Attributes:
        number: of the call.
    """

    number: int


class ErrorTable:
    """The classes of errors that may cross a channel; no other class is made from a peer's message.

    Args:
        kinds: each keeps the arguments of its constructor as attributes of the same names.
    """

    def __init__(self, *kinds: type[FdasyncError]) -> None:
        self._fields = {kind: frozenset(inspect.signature(kind).parameters) for kind in kinds}

    def __contains__(self, error: BaseException) -> bool:
        return type(error) in self._fields

    def pack(self, number: int, error: FdasyncError) -> Failed:
        """An error of the table, for the wire. A limit may be of any type, so it crosses in words."""
        values = {name: getattr(error, name) for name in self._fields[type(error)]}
        fields = {
            name: value if value is None or (isinstance(value, int) and name != "limit") else str(value)
            for name, value in values.items()
        }
        return Failed(number, type(error).__name__, fields)

    def unpack(self, failed: Failed) -> FdasyncError:
        """The error of a message. Raises ProtocolError for a class that is not in the table, or for wrong fields."""
        for kind, fields in self._fields.items():
            if kind.__name__ == failed.kind and failed.fields.keys() == fields:
                with contextlib.suppress(TypeError, ValueError):
                    return kind(**failed.fields)
        raise ProtocolError(f"a child process failed in a way that has no name here: {failed.kind}")


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
        # by number: the future, how its value is decoded, and whether the value fits the call
        self._calls: dict[
            int, tuple[asyncio.Future[Any], msgspec.msgpack.Decoder[Any], Callable[[Any], bool] | None]
        ] = {}
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

    def send(
        self,
        message: msgspec.Struct,
        kind: msgspec.msgpack.Decoder[T],
        *,
        fds: Sequence[int] = (),
        fits: Callable[[T], bool] | None = None,
    ) -> asyncio.Future[T]:
        """Call; the future ends with the answer. Cancelling the future stops the waiting only.

        Args:
            kind: decodes the answer's value.
            fds: ride along; keep them open until the answer has come.
            fits: whether a value can be the answer to this call. If it is False or raises ProtocolError the child broke
                the protocol, and is killed.

        Raises TypeError, ValueError or OverflowError for a message that cannot be encoded, ProtocolError for a message
        that is too large. A child that is ending is sent nothing: the future fails when the child is gone.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        if self.gone.done():
            _fail(answer, self.gone.result())  # it is done
            return answer
        number = self._number + 1
        if self.ending is None:
            self.process.channel.send(self._encoder.encode(Call(number, message)), fds)
        # a call to a child that is ending fails with all others: never before the owner has learned of the end
        self._number = number
        self._calls[number] = answer, kind, fits
        return answer

    async def ask(
        self, message: msgspec.Struct, kind: msgspec.msgpack.Decoder[T], fits: Callable[[T], bool] | None = None
    ) -> T:
        """Call and wait for the answer, even when cancelled; then the child is asked, once, to stop the call."""
        answer = self.send(message, kind, fits=fits)
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
            answer, kind, fits = call
            value = kind.decode(message.value) if isinstance(message, Answer) else message
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"the {self._name} process sent what cannot be decoded: {error}") from None
        if isinstance(message, Answer):
            fit = fits is None or fits(value)
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
