"""What crosses to another process, derived from a contract: from the signatures of methods that are marked `remote`
(docs/design.md, rule 47).

A marked method is written once, in its class. From its signature follow the message (a struct of its arguments), the
decoder of its answer, and the memory and descriptors that ride along. `ipc/rpc.py` sends the message and waits,
`ipc/service.py` calls the method of that name in the child, and `forwarding` fills a class that stands for another
object. Knows no contract. Those that mark methods are the store's, the runner's and each service of a child process.
"""

from __future__ import annotations

import abc
import asyncio
import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NewType, Protocol, TypeVar

import msgspec

from fdasync.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized
    from typing import Self

C = TypeVar("C", bound=type)
F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

#: a descriptor that crosses with its call: the receiver's own, which is closed when the call has ended; -1: none
Fd = NewType("Fd", int)
NO_FD = Fd(-1)


class Mapped(Protocol):
    """Memory that processes share: it crosses as its plan and its descriptors, and the receiver maps it again.

    Attributes:
        plan: plain data of the type `plan_type`, which says what the memory holds.
        fds: the descriptors, which stay the sender's.
    """

    plan_type: typing.ClassVar[Any]

    @property
    def plan(self) -> Any: ...

    @property
    def fds(self) -> Sequence[int]: ...

    @classmethod
    def attach(cls, plan: Any, fds: Iterator[int]) -> Self:
        """Map what a sender shares; takes as many descriptors as it needs, which belong to the result. Raises
        InvariantBroken where the memory is not as the plan says, OSError."""
        ...

    def close(self) -> None:
        """Give the mapping and its descriptors back; idempotent."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a marked method is called.

    Attributes:
        beside: it waits for no other call, and cancelling the caller stops it.
        fits: whether a value can be its answer; it is called with the value and the arguments.
        words: what it does, where a process that stands for several tells how long they take.
        ranks: of several processes, those that are called: all, or the first alone.
        changes: of several processes all must do it, or none may.
    """

    beside: bool = False
    fits: Callable[..., bool] | None = None
    words: str = ""
    ranks: typing.Literal["all", "first"] = "all"
    changes: bool = False


def remote(**options: Any) -> Callable[[F], F]:
    """Mark a method of a contract; `options`: fields of `Options`. Types in its signature must be there at runtime."""

    def mark(function: F) -> F:
        function.__dict__["remote"] = Options(**options)
        return function

    return mark


def one_each(values: Sized, asked: Sized) -> bool:
    """`Options.fits` of a call that is answered with a value for each item."""
    return len(values) == len(asked)


def some_of(count: int, asked: Sized) -> bool:
    """`Options.fits` of a call that is answered with the number of some of the items."""
    return 0 <= count <= len(asked)


class _Received:
    """The descriptors of one call: those that are taken belong to the taker, the others are closed with the call."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._borrowed = 0
        # memory that was mapped for this call
        self.attached: list[Mapped] = []

    def attach(self, kind: type[Mapped], plan: Any) -> Mapped:
        self.attached.append(kind.attach(plan, self))
        return self.attached[-1]

    def borrow(self) -> Fd:
        self._check()
        self._borrowed += 1
        return Fd(self._fds[self._borrowed - 1])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self._check()
        return self._fds.pop(self._borrowed)

    def _check(self) -> None:
        if self._borrowed == len(self._fds):
            raise ProtocolError("a call came without its descriptors")


class _Plain:
    """A parameter of plain data."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def pack(self, value: Any, fds: list[int]) -> Any:  # noqa: ARG002 - as the others
        return value

    def unpack(self, value: Any, fds: _Received) -> Any:  # noqa: ARG002 - as the others
        return value


class _Descriptors:
    """A parameter of one descriptor, or of several: it crosses as their number."""

    annotation = int

    def __init__(self, *, several: bool) -> None:
        self._several = several

    def pack(self, value: Any, fds: list[int]) -> int:
        own = list(value) if self._several else [value] if value >= 0 else []
        fds += own
        return len(own)

    def unpack(self, value: int, fds: _Received) -> Any:
        own = [fds.borrow() for _ in range(value)]
        return own if self._several else own[0] if own else NO_FD


class _Memory:
    """A parameter of shared memory: one piece, or None, or several pieces."""

    def __init__(self, kind: type[Mapped], *, several: bool) -> None:
        self._kind = kind
        self._several = several
        self.annotation: Any = types.GenericAlias(tuple, (kind.plan_type, ...)) if several else kind.plan_type | None

    def pack(self, value: Any, fds: list[int]) -> Any:
        pieces: Sequence[Mapped] = value if self._several else [] if value is None else [value]
        for piece in pieces:
            fds += piece.fds
        plans = tuple([piece.plan for piece in pieces])
        return plans if self._several else plans[0] if plans else None

    def unpack(self, value: Any, fds: _Received) -> Any:
        if self._several:
            return [fds.attach(self._kind, plan) for plan in value]
        return None if value is None else fds.attach(self._kind, value)


def _crossing_of(hint: Any) -> _Plain | _Descriptors | _Memory:
    """How values of this type cross."""
    several = typing.get_origin(hint) is collections.abc.Sequence
    kind = typing.get_args(hint)[0] if several else hint
    if kind is Fd:
        return _Descriptors(several=several)
    if isinstance(kind, types.UnionType) and type(None) in kind.__args__ and len(kind.__args__) == 2:
        (kind,) = [one for one in kind.__args__ if one is not type(None)]
    return _Memory(kind, several=several) if hasattr(kind, "plan_type") else _Plain(hint)


class Method(Generic[T]):
    """What crosses of one marked method.

    Attributes:
        name: of the method.
        options: as it was marked.
        messages: the types of its message.
        answer: decodes its answer.
        waits: it is a coroutine function; else it begins at once, and returns a future, or nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.name = function.__name__
        self.options: Options = function.__dict__["remote"]
        self.waits = inspect.iscoroutinefunction(function)
        found = hints["return"]
        value = typing.get_args(found)[0] if typing.get_origin(found) is asyncio.Future else found
        self.answer: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(value)
        self._signature = inspect.Signature(parameters)
        self._by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        self._crossing = [_crossing_of(hints[one.name]) for one in parameters]
        self._is_plain = all(isinstance(one, _Plain) for one in self._crossing)
        self.is_whole = len(parameters) == 1 and _are_tagged(hints[parameters[0].name])
        if self.is_whole:
            # its one argument is a message by itself: steps and copies are not wrapped once more
            self.messages = _of_union(hints[parameters[0].name])
        else:
            fields = [(one.name, how.annotation) for one, how in zip(parameters, self._crossing, strict=True)]
            made = msgspec.defstruct(
                self.name, fields, frozen=True, array_like=True, tag=self.name, forbid_unknown_fields=True
            )
            self.messages = (made,)

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[msgspec.Struct, list[int]]:
        """The message of a call, and the descriptors that ride along. Raises TypeError for other arguments."""
        if self.is_whole:
            (message,) = args
            return message, []
        if self._is_plain and not kwargs and len(args) == len(self._crossing):
            return self.messages[0](*args), []
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fds: list[int] = []
        values = bound.arguments.values()
        packed = [one.pack(value, fds) for one, value in zip(self._crossing, values, strict=True)]
        return self.messages[0](*packed), fds

    def call(self, target: Any, message: msgspec.Struct, fds: list[int]) -> Any:
        """Call the method of an object with the arguments of a message. Descriptors that it takes are taken out of
        `fds`."""
        function = getattr(target, self.name)
        if self.is_whole:
            return function(message)
        values: Sequence[Any] = msgspec.structs.astuple(message)
        if not self._is_plain:
            received = _Received(fds)
            try:
                values = [one.unpack(value, received) for one, value in zip(self._crossing, values, strict=True)]
            except BaseException:
                for memory in received.attached:
                    memory.close()
                raise
        if not self._by_name:
            return function(*values)
        first = len(values) - len(self._by_name)
        return function(*values[:first], **dict(zip(self._by_name, values[first:], strict=True)))

    def fits(self, value: T, message: msgspec.Struct) -> bool:
        """Whether a value can be the answer to this message."""
        fits = self.options.fits
        return fits is None or fits(value, *((message,) if self.is_whole else msgspec.structs.astuple(message)))


def _of_union(hint: Any) -> tuple[Any, ...]:
    return hint.__args__ if isinstance(hint, types.UnionType) else (hint,)


def _are_tagged(hint: Any) -> bool:
    return all(
        isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__struct_config__.tag is not None
        for one in _of_union(hint)
    )


def method_of(function: Callable[..., Any]) -> Method[Any]:
    """What crosses of a marked method; derived once."""
    found = function.__dict__.get("method")
    if found is None:
        found = function.__dict__["method"] = Method(function)
    return typing.cast("Method[Any]", found)


def marked(*classes: type) -> dict[str, Method[Any]]:
    """The marked methods of classes and of their bases, by name."""
    found: dict[str, Method[Any]] = {}
    for one in classes:
        for base in reversed(one.__mro__):
            for name, member in vars(base).items():
                if isinstance(member, types.FunctionType) and "remote" in member.__dict__:
                    found[name] = method_of(member)
    return found


def forwarding(contract: type) -> Callable[[C], C]:
    """Fill a class that stands for another object: each marked method of a contract that its body lacks.

    A filled coroutine function returns `await self.forward(method, args, kwargs)`, any other one
    `self.forward_now(method, args, kwargs)`.
    """

    def fill(cls: C) -> C:
        for name, method in marked(contract).items():
            if name not in vars(cls):
                function = _forwards(method) if method.waits else _forwards_now(method)
                functools.update_wrapper(function, getattr(contract, name), updated=())
                setattr(cls, name, function)
        abc.update_abstractmethods(cls)
        return cls

    return fill


def _forwards(method: Method[Any]) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.forward(method, args, kwargs)

    return forward


def _forwards_now(method: Method[Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward_now(method, args, kwargs)

    return forward
