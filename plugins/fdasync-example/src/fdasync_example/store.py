"""A store in one SQLite file, atomic through its transactions. Knows the contract (`fdasync.cache.store`) only.

Its verbs block, so `blocking` is set and fdasync runs the store in a process of its own: nothing here has to be async,
and a verb that never awaits cannot be cancelled half-way. A put writes part by part from shared memory into the file's
pages (incremental blob I/O); a get makes one `bytes` object of a value and copies that into the parts.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store import DONE, EXISTS, MISS, Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.validation import check_items, check_keys
from fdasync.errors import StoreRejected, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.ipc.shared_memory import SharedRegion

_TABLE = "CREATE TABLE IF NOT EXISTS objects (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, value BLOB)"
_USAGE = "SELECT COUNT(*), COALESCE(SUM(LENGTH(value)), 0) FROM objects"
_BUSY_S = 3.0  # for a lock of another process: shorter than `store_deadline_s`
_LIMIT_NBYTES = 500_000_000  # SQLite's own for a value is 10^9


class SqliteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file and its cap.

    Attributes:
        path: of the file; the store makes it if it is missing, but not its folder.
        max_nbytes: most bytes of all values; the oldest values go for new ones. None: no cap.
    """

    path: str
    max_nbytes: int | None = None


class SqliteStore(Store):
    """See the module. Engines of one machine may share a file."""

    config_type = SqliteConfig
    blocking = True

    def __init__(self, config: SqliteConfig) -> None:
        super().__init__(config)
        self.capabilities = Capabilities(
            name="sqlite",
            # a commit is in the write-ahead log, which is not synced: a loss of power takes the latest, never halves
            durability="process",
            shared=True,
            max_item_nbytes=_LIMIT_NBYTES,
            capacity_nbytes=config.max_nbytes,
        )
        self._max_nbytes: int | None = config.max_nbytes
        self._db: sqlite3.Connection | None = None
        self._regions: Sequence[SharedRegion] = ()

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._regions = tuple(regions)
        try:
            self._db = sqlite3.connect(self.config.path, timeout=_BUSY_S)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(_TABLE)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StoreUnavailable("sqlite", f"{self.config.path}: {error}") from error
            raise StoreRejected("sqlite", f"{self.config.path}: {error}", "name a file in a writable folder") from error

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        check_keys(keys, self.capabilities)
        with self._transaction() as db:
            for place, key in enumerate(keys):
                if db.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone() is None:
                    return place
        return len(keys)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        check_items(items, self.capabilities, self._regions)
        return [self._get(item) for item in items]

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        check_items(items, self.capabilities, self._regions)
        return [self._put(item) for item in items]

    async def delete(self, keys: Sequence[str]) -> int:
        check_keys(keys, self.capabilities)
        with self._transaction() as db:
            return sum(db.execute("DELETE FROM objects WHERE key = ?", (key,)).rowcount for key in keys)

    async def usage(self) -> StoreUsage:
        with self._transaction() as db:
            objects, nbytes = db.execute(_USAGE).fetchone()
        return StoreUsage(objects=objects, nbytes=nbytes)

    async def aclose(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _get(self, item: Item) -> Outcome:
        with self._transaction() as db:
            row = db.execute("SELECT value FROM objects WHERE key = ?", (item.key,)).fetchone()
        if row is None:
            return MISS
        value = memoryview(row[0])
        if len(value) != item.nbytes:
            return Outcome("damaged", f"{len(value)} bytes are stored, {item.nbytes} were asked for")
        start = 0
        for part in item.parts:
            self._regions[part.region].view(part.offset, part.nbytes)[:] = value[start : start + part.nbytes]
            start += part.nbytes
        return DONE

    def _put(self, item: Item) -> Outcome:
        if self._max_nbytes is not None and item.nbytes > self._max_nbytes:
            return Outcome("full", f"{item.nbytes} bytes never fit in {self._max_nbytes}")
        insert = "INSERT INTO objects (key, value) VALUES (?, ZEROBLOB(?)) ON CONFLICT DO NOTHING"
        try:
            with self._transaction() as db:
                cursor = db.execute(insert, (item.key, item.nbytes))
                if not cursor.rowcount:
                    return EXISTS
                with db.blobopen("objects", "value", cursor.lastrowid or 0) as blob:
                    for part in item.parts:
                        blob.write(self._regions[part.region].view(part.offset, part.nbytes))
                self._make_room(db)
        except StoreUnavailable as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
                return Outcome("full", error.problem)
            raise
        return DONE

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Drop the oldest objects until the cap holds. Sums up all sizes: fine for thousands of objects."""
        while self._max_nbytes is not None and db.execute(_USAGE).fetchone()[1] > self._max_nbytes:
            db.execute("DELETE FROM objects WHERE id = (SELECT MIN(id) FROM objects)")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The database: changes within the block are kept whole, or none if it raises. Raises StoreUnavailable."""
        if self._db is None:
            raise StoreUnavailable("sqlite", "it is closed")
        try:
            with self._db as db:
                yield db
        except sqlite3.Error as error:
            raise StoreUnavailable("sqlite", str(error)) from error
