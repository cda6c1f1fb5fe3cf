"""The configuration of the Mooncake store, and its checks. Knows no client. Used by `store.py` and `client.py`."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from fdasync.errors import StoreRejected

NAME = "mooncake"
_PREFIX = re.compile(r"[0-9a-z_-]([0-9a-z./_-]*[0-9a-z_-])?")


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of the pool, the memory lent to it, and the deadlines of calls.

    Attributes:
        master: address of the master, HOST:PORT (a name or an IPv4 address).
        local_hostname: the address under which other machines reach this one; "" takes the address from which this
            machine reaches the master. Never "localhost" with several machines.
        metadata_server: "P2PHANDSHAKE" needs no server; else the URL of the metadata server.
        protocol: "tcp", or "rdma" (needs `devices`, and memory that may be locked).
        devices: names of RDMA devices, separated by commas.
        segment_nbytes: memory that the store's process lends to the pool; 0 lends nothing. It ends with that process,
            which is killed when a call hangs: lend memory from processes of their own instead (README).
        local_buffer_nbytes: the client's own buffer. Not used here: bytes move between the pool and the regions.
        replicas: copies of each object, in different segments.
        prefix: of every key, so that fleets that must not meet can share a master.
        metrics: address of the master's metrics server, HOST:PORT, for `usage`; "": not asked.
        probe_timeout_s: to reach the master's port, at start and after a failure.
        rpc_timeout_s: for an answer of the master.
        transfer_timeout_s: without a byte from or to another machine, in whole seconds (tcp only).
        threads: gets and puts that move bytes at a time; the others wait, lookups and deletes do not. Several threads
            take CPU from each other: they pay only where they mostly wait (README).
    """

    master: str = "127.0.0.1:50051"
    local_hostname: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_nbytes: int = 0
    local_buffer_nbytes: int = 0
    replicas: int = 1
    prefix: str = "fdasync"
    metrics: str = ""
    probe_timeout_s: float = 1.0
    rpc_timeout_s: float = 3.0
    transfer_timeout_s: int = 3
    threads: int = 1


def check_config(config: MooncakeConfig) -> None:
    """Raise StoreRejected naming the first impossible value."""
    parse_address("master", config.master)
    if config.metrics:
        parse_address("metrics", config.metrics)
    if not _PREFIX.fullmatch(config.prefix) or ".." in config.prefix or len(config.prefix) > 100:
        raise StoreRejected(NAME, f"prefix {config.prefix!r} is not the beginning of a key of at most 100 characters")
    for name, least in (("segment_nbytes", 0), ("local_buffer_nbytes", 0), ("replicas", 1), ("threads", 1)):
        if getattr(config, name) < least:
            raise StoreRejected(NAME, f"{name} is {getattr(config, name)}, at least {least} is needed")
    for name in ("probe_timeout_s", "rpc_timeout_s", "transfer_timeout_s"):
        if getattr(config, name) <= 0:
            raise StoreRejected(NAME, f"{name} is {getattr(config, name)}: no wait is without a deadline")
    if config.protocol == "rdma" and not config.devices:
        raise StoreRejected(NAME, "protocol is rdma and devices names none")


def parse_address(field: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises StoreRejected."""
    host, _, port = text.rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise StoreRejected(NAME, f"{field} is {text!r}, not HOST:PORT with a name or an IPv4 address")
    return host, int(port)
