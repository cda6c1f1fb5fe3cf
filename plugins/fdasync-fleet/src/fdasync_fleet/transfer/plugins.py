"""Makes a transport of a plugin's name. Knows the contract and no instance. Called by instances and their transfer
process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import PluginError
from fdasync.registry.registry import TRANSPORTS, Registry
from fdasync_fleet.transfer.base import Transport
from fdasync_fleet.transfer.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Callable


class TransportSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a transport is made.

    Attributes:
        name: of the plugin.
        keyed_host: where links have keys: the address at which this side is reached, in numbers; "": the loopback.
        tls: of "tcp", where links have keys: blocks travel by TLS.
        said_host: the address that receivers dial, in numbers; "": the address that it listens on.
        port: of "tcp": that it listens on; 0: any.
        optional: the others are opened without it where it does not open.
    """

    name: str
    keyed_host: str = ""
    tls: bool = False
    said_host: str = ""
    port: int = 0
    optional: bool = False


def transport_class(name: str) -> type[Transport]:
    """The transport of this name. Raises PluginError."""
    # mypy takes an abstract base for a class that is going to be made
    return Registry().load(TRANSPORTS, name, Transport)


def make_transport(spec: TransportSpec) -> Transport:
    """A transport. Raises PluginError, BadInput for the address, ConfigError for TLS without what it
    needs."""
    transport: Callable[..., Transport] = transport_class(spec.name)
    options: dict[str, str | bool | int] = {}
    if transport is TcpTransport and spec.keyed_host:
        options = {"host": spec.keyed_host, "keyed": True, "tls": spec.tls, "said_host": spec.said_host}
    elif spec.keyed_host and transport_class(spec.name).takes_host:
        options = {"host": spec.said_host or spec.keyed_host, "keyed": True}
    if transport is TcpTransport:
        options["port"] = spec.port
    try:
        return transport(**options)
    except TypeError as error:
        how = f"with {', '.join(options)}" if options else "without arguments"
        raise PluginError(TRANSPORTS, spec.name, "", f"it cannot be made {how}: {error}") from error
