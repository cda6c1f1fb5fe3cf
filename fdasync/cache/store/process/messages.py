"""Messages between an engine and the process that hosts a store, and errors on the wire. Pure data.

engine                              host
  Open(store, config, ...) + fds -->   maps the regions, opens the store
                                 <--   Opened(capabilities) | Refused(0)
  GetInto(1), Put(2), ...        -->   performed at the same time
                                 <--   Outcomes(2), Outcomes(1) ...: one answer for each call, in any order
  Cancel(3)                      -->   stops early if it can
                                 <--   Stopped(3), or the answer that was under way
  Close                          -->   closes the store, exits; the end of the stream means the same

Calls are numbered from 1 by the engine. Fields are checked when they are decoded (`msgspec`), numbers and lengths by
who receives them.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from fdasync import errors
from fdasync.cache.store.base import Capabilities, Item, Outcome, StoreUsage
from fdasync.cache.store.block_format import BlockSchema


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Host this store. `config` is checked by its own type; `region_nbytes` are of the fds that ride along."""

    store: str
    config: dict[str, Any]
    schema: BlockSchema | None
    region_nbytes: tuple[int, ...]


class ExistsPrefix(msgspec.Struct, frozen=True, array_like=True, tag="exists"):
    """`Store.exists_prefix`."""

    number: int
    keys: tuple[str, ...]


class GetInto(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """`Store.get_into`."""

    number: int
    items: tuple[Item, ...]


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """`Store.put`."""

    number: int
    items: tuple[Item, ...]


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """`Store.delete`."""

    number: int
    keys: tuple[str, ...]


class Usage(msgspec.Struct, frozen=True, array_like=True, tag="usage"):
    """`Store.usage`."""

    number: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for this call any more; it is answered all the same."""

    number: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """End."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """Calls may come."""

    capabilities: Capabilities


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Answer to `ExistsPrefix` and `Delete`."""

    number: int
    count: int


class Outcomes(msgspec.Struct, frozen=True, array_like=True, tag="outcomes"):
    """Answer to `GetInto` and `Put`."""

    number: int
    outcomes: list[Outcome]


class Used(msgspec.Struct, frozen=True, array_like=True, tag="used"):
    """Answer to `Usage`."""

    number: int
    usage: StoreUsage


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """The call ended because it was cancelled."""

    number: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The call raised, or opening did (number 0): the error's class and its constructor's arguments."""

    number: int
    kind: str
    fields: dict[str, str | None]


Call = ExistsPrefix | GetInto | Put | Delete | Usage
Answer = Count | Outcomes | Used
ToHost = Open | ExistsPrefix | GetInto | Put | Delete | Usage | Cancel | Close
ToEngine = Opened | Count | Outcomes | Used | Stopped | Refused

_SENT_WHOLE: dict[type[errors.FdasyncError], tuple[str, ...]] = {
    errors.BadInput: ("field", "problem", "limit", "hint"),
    errors.ConfigError: ("field", "problem", "limit", "hint"),
    errors.PluginError: ("group", "name", "distribution", "problem"),
    errors.StoreRejected: ("store", "problem", "hint"),
    errors.StoreUnavailable: ("store", "problem"),
}


def pack_error(number: int, store: str, error: BaseException) -> Refused:
    """An error for the wire; what a store should not raise becomes a StoreUnavailable in words."""
    fields = next((fields for kind, fields in _SENT_WHOLE.items() if kind is type(error)), None)
    if fields is None:
        problem = error.problem if isinstance(error, errors.StoreUnavailable) else f"{type(error).__name__}: {error}"
        return Refused(number, "StoreUnavailable", {"store": store, "problem": problem})
    values = {name: getattr(error, name) for name in fields}
    return Refused(
        number, type(error).__name__, {name: value if value is None else str(value) for name, value in values.items()}
    )


def unpack_error(refused: Refused) -> errors.FdasyncError:
    """The error again. Only classes of the table are made, whatever the wire says. Raises ProtocolError."""
    for kind, fields in _SENT_WHOLE.items():
        if kind.__name__ == refused.kind and set(refused.fields) == set(fields):
            return kind(**cast("dict[str, Any]", refused.fields))
    raise errors.ProtocolError(f"the store process failed in a way that has no name here: {refused.kind}")
