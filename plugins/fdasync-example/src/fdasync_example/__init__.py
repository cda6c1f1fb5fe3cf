"""The smallest useful plugins for fdasync: a store in an SQLite file, a transport over Unix sockets, a tiny runner.

Read the modules and copy them. The contracts are in `store/base.py`, `transfer/base.py` and `runner/base.py`.
"""

from __future__ import annotations

from fdasync_example.runner import TinyMoeConfig, TinyMoeRunner
from fdasync_example.store import SqliteConfig, SqliteStore
from fdasync_example.transport import UnixTransport

__all__ = ["SqliteConfig", "SqliteStore", "TinyMoeConfig", "TinyMoeRunner", "UnixTransport"]
