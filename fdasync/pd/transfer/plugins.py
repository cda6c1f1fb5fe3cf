"""Makes a transport of a plugin's name. Knows the contract and no instance. Called by instances and their transfer
process."""

from __future__ import annotations

import msgspec

from fdasync.errors import PluginError
from fdasync.pd.transfer.base import Transport
from fdasync.pd.transfer.tcp import TcpTransport
from fdasync.registry.registry import TRANSPORTS, Registry


class TransportSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a transport is made.

    Attributes:
        name: of the plugin.
        keyed_host: of "tcp", where links have keys: the address that it listens on, in numbers; "": the loopback.
        tls: of "tcp", where links have keys: blocks travel by TLS.
        said_host: of "tcp": the address that receivers dial, in numbers; "": the one that it listens on.
        port: of "tcp": that it listens on; 0: any.
    """

    name: str
    keyed_host: str = ""
    tls: bool = False
    said_host: str = ""
    port: int = 0


def make_transport(spec: TransportSpec) -> Transport:
    """A transport. Raises PluginError, BadInput for the address, ConfigError for TLS without what it
    needs."""
    if spec.keyed_host:
        return TcpTransport(spec.keyed_host, keyed=True, tls=spec.tls, said_host=spec.said_host, port=spec.port)
    if spec.name == "tcp":
        return TcpTransport(port=spec.port)
    name = spec.name
    # mypy takes an abstract base for a class that is going to be made
    transport = Registry().load(TRANSPORTS, name, Transport)  # type: ignore[type-abstract]
    try:
        return transport()
    except TypeError as error:
        raise PluginError(TRANSPORTS, name, "", f"it cannot be made without arguments: {error}") from error
