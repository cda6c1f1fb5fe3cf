"""The smallest useful plugins for fdasync: a store in an SQLite file, and a transport over Unix sockets.

Read `store/base.py` and `transfer/base.py`; they are meant to be copied.
"""

from __future__ import annotations

from fdasync_example.store import SqliteConfig, SqliteStore
from fdasync_example.transport import UnixTransport

__all__ = ["SqliteConfig", "SqliteStore", "UnixTransport"]
