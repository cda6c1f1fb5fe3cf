"""The smallest useful store for fdasync: blocks in an SQLite file. Read `store.py`; it is meant to be copied."""

from __future__ import annotations

from fdasync_example.store import SqliteConfig, SqliteStore

__all__ = ["SqliteConfig", "SqliteStore"]
