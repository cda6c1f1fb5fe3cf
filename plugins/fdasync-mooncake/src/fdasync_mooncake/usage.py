"""Reads the contents of the whole pool from the master's metrics server, by a blocking HTTP request.

Knows no client. Called by `store.py` and `testing.py`.
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import StoreUnavailable
from fdasync_mooncake.config import NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_NBYTES = 16 << 20


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the whole pool, shared with other users.

    Attributes:
        objects: number of keys.
        nbytes: memory in use.
        capacity_nbytes: memory of all segments.
    """

    objects: int
    nbytes: int
    capacity_nbytes: int


def read_usage(host: str, port: int, timeout_s: float) -> PoolUsage:
    """Ask the metrics server. Raises StoreUnavailable."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(_MAX_NBYTES).decode("ascii", "replace")
        return parse_usage(text.splitlines())
    except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
        problem = f"no figures from the master's metrics server {host}:{port}: {type(error).__name__}: {error}"
        raise StoreUnavailable(NAME, problem) from error
    finally:
        connection.close()


def parse_usage(lines: Iterable[str]) -> PoolUsage:
    """The figures among lines of metrics. Raises KeyError for a missing one, ValueError if a figure is no number."""
    found = {}
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("master_key_count", "master_allocated_bytes", "master_total_capacity_bytes"):
            found[name] = int(value)
    return PoolUsage(
        objects=found["master_key_count"],
        nbytes=found["master_allocated_bytes"],
        capacity_nbytes=found["master_total_capacity_bytes"],
    )
