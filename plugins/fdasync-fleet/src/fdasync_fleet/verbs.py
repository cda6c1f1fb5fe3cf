"""What a router has an instance do: the methods of `Verbs`, and the errors of their outcomes.

A call crosses as a message that is derived from the method's signature (`fdasync/ipc/remote.py`). `messages.py` carries
it, `instance/peer_verbs.py` performs it, `router/control.py` and its neighbours send it. Knows no links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from fdasync import errors
from fdasync.errors import FdasyncError, ProtocolError, RemoteError
from fdasync.ipc.errors import ErrorTable, Failed
from fdasync.ipc.remote import marked, method_of, remote
from fdasync.request import GroupTensors, PauseMode, SleepMode, WakeTag, WeightsGroup
from fdasync_fleet.fields import WORDS_CHARS, Count, Meta, Name, Seconds, Version, Words

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")


class Verbs(ABC):
    """An instance, as a router controls it. Errors of other classes than those below become a RemoteError."""

    @abstractmethod
    @remote()
    async def claim(self, change: Name, limit_s: Seconds) -> None:
        """No other router may make a change for so long, or until this router's change or its link ends.

        Args:
            change: the verb that makes it, the first one where it has several.

        Raises UpdateUnderWay while another router has claimed the instance, as all changes do (`CHANGES` in
        `instance/peer_verbs.py`).
        """

    @abstractmethod
    @remote()
    async def release(self) -> None:
        """End a claim."""

    @abstractmethod
    @remote()
    async def update_weights(
        self,
        version: Version,
        source: Words | GroupTensors,
        mode: Literal["abort", "keep"],
        order: Count = 0,
        expected: Words = "",
        weights_id: Words = "",
    ) -> None:
        """See `Engine.update_weights`.

        Args:
            order: of the label.
            source: a checkpoint folder, or tensors that a group brings.
            expected: fingerprint that the weights must have; "": any.
            weights_id: what all instances call weights that a group brought; 32 hex digits.
        """

    @abstractmethod
    @remote()
    async def relabel(self, version: Version, order: Count = 0) -> None:
        """Give the weights in use another label."""

    @abstractmethod
    @remote()
    async def begin_update(self, mode: Literal["abort", "keep"]) -> None:
        """Begin an update in parts."""

    @abstractmethod
    @remote()
    async def update_part(self, part: GroupTensors) -> None:
        """Take tensors that a group brings."""

    @abstractmethod
    @remote()
    async def end_update(
        self, version: Version, order: Count = 0, expected: Words = "", weights_id: Words = ""
    ) -> None:
        """End an update in parts; as `update_weights`."""

    @abstractmethod
    @remote()
    async def abandon_update(self) -> None:
        """Drop an update in parts."""

    @abstractmethod
    @remote()
    async def join_group(self, group: WeightsGroup) -> None:
        """See `Generator.join_weights_group`; with the instance's own ranks."""

    @abstractmethod
    @remote()
    async def leave_group(self, name: Words) -> None:
        """See `Generator.leave_weights_group`."""

    @abstractmethod
    @remote()
    async def pause(self, mode: PauseMode) -> None:
        """See `Generator.pause`."""

    @abstractmethod
    @remote()
    async def resume(self) -> None:
        """See `Generator.resume`."""

    @abstractmethod
    @remote()
    async def sleep(self, level: Count, mode: SleepMode, tags: tuple[WakeTag, ...]) -> None:
        """See `Generator.sleep`. `tags`: (): all parts of the level."""

    @abstractmethod
    @remote()
    async def wake(self, tags: tuple[WakeTag, ...] = ()) -> None:
        """See `Generator.wake`. `tags`: (): all parts."""

    @abstractmethod
    @remote()
    async def reset_cache(self) -> None:
        """See `Generator.reset_cache`."""

    @abstractmethod
    @remote()
    async def fingerprint(self) -> str:
        """See `Generator.weights_fingerprint`."""

    @abstractmethod
    @remote()
    async def profile(self, seconds: Seconds) -> str:
        """See `Generator.profile`; returns the folder of the files."""

    @abstractmethod
    @remote()
    async def drain(self, limit_s: Seconds) -> None:
        """Take no new requests, and return when all have ended."""


#: by the type of a message, its method
METHODS = {message: method for method in marked(Verbs).values() for message in method.messages}
#: the type of all messages of `Verbs`
Verb: Any = reduce(or_, METHODS)


def verb(function: Callable[Concatenate[Verbs, P], Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """The message of a call: a frozen struct with the method's arguments as fields."""
    message, _ = method_of(function).pack(args, kwargs)
    return message


def name_of(message: Any) -> str:
    """Of the method that a message calls."""
    return METHODS[type(message)].name


def folder_of(message: Any) -> str:
    """The checkpoint folder of an update; "" for other verbs, and for tensors."""
    source = getattr(message, "source", "")
    return source if isinstance(source, str) else ""


# -- errors ---------------------------------------------------------------------------------------

_ERRORS = ErrorTable(
    errors.BadInput, errors.ConfigError, errors.UpdateUnderWay, errors.Asleep, errors.WeightsRejected,
    errors.WeightsBroken, errors.WeightsDiffer, errors.WakeFailed,
)  # fmt: skip


_Several = Annotated[tuple[Words, ...], Meta(max_length=16)]


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An error of a verb.

    Attributes:
        kind: name of the error's class.
        fields: its constructor's arguments; of a class that routers do not know `problem` alone.
    """

    kind: Words
    fields: Annotated[dict[Words, Count | Words | _Several | None], Meta(max_length=16)]


def failure_of(error: FdasyncError) -> Failure:
    """An error, for the wire."""
    if error in _ERRORS:
        packed = _ERRORS.pack(0, error)
        return Failure(packed.kind, {name: _brief(value) for name, value in packed.fields.items()})
    return Failure(type(error).__name__, {"problem": _brief(str(error))})


def _brief(value: Any) -> Any:
    """A text, or each of several, as `Words` can carry it: cut to the longest length, and encodable as UTF-8."""
    if isinstance(value, tuple):
        return tuple([_brief(each) for each in value[:16]])
    return value[:WORDS_CHARS].encode(errors="replace").decode() if isinstance(value, str) else value


def error_of(who: str, failure: Failure) -> FdasyncError:
    """The error of an instance, which it names; RemoteError for a class that callers do not know."""
    try:
        return _ERRORS.unpack(Failed(0, failure.kind, failure.fields)).told_by(who)
    except ProtocolError:
        return RemoteError(who, failure.kind, str(failure.fields.get("problem", "")))
