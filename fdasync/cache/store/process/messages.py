"""The calls that an engine makes to the store's process, and the answer of each. Pure data.

The first call is `Open`, with the fds of the regions; verbs follow once it was answered, are performed at the same time
and answered in any order (`ipc/rpc.py`). `msgspec` checks the fields when it decodes them, the receiving side checks
numbers and lengths. Both sides use it, `proxy.py` and `main.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fdasync import errors
from fdasync.cache.store.base import Item
from fdasync.cache.store.block_format import BlockSchema
from fdasync.ipc.rpc import ErrorTable


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Make this store and open it; the answer is its `Capabilities`.

    Attributes:
        store: the plugin's name.
        config: raw; the process decodes it into the store's `config_type`.
        schema: of the block objects that the store keeps; None: it keeps plain bytes.
        region_nbytes: sizes of the regions whose fds ride along.
    """

    store: str
    config: dict[str, Any]
    schema: BlockSchema | None
    region_nbytes: tuple[int, ...]


class ExistsPrefix(msgspec.Struct, frozen=True, array_like=True, tag="exists"):
    """`Store.exists_prefix`; the answer is its count."""

    keys: tuple[str, ...]


class GetInto(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """`Store.get_into`; the answer is its outcomes."""

    items: tuple[Item, ...]


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """`Store.put`; the answer is its outcomes."""

    items: tuple[Item, ...]


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """`Store.delete`; the answer is its count."""

    keys: tuple[str, ...]


class Usage(msgspec.Struct, frozen=True, array_like=True, tag="usage"):
    """`Store.usage`; the answer is its `StoreUsage`."""


Verb = ExistsPrefix | GetInto | Put | Delete | Usage

ERRORS = ErrorTable(
    errors.BadInput, errors.ConfigError, errors.PluginError, errors.StoreRejected, errors.StoreUnavailable
)


def error_of(store: str, error: BaseException) -> errors.FdasyncError:
    """The error that an answer carries; an error that no store should raise becomes a StoreUnavailable."""
    if error in ERRORS:
        assert isinstance(error, errors.FdasyncError)
        return error
    problem = error.problem if isinstance(error, errors.StoreUnavailable) else f"{type(error).__name__}: {error}"
    return errors.StoreUnavailable(store, problem)
