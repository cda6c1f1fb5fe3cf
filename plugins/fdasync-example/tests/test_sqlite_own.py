"""What is SQLite's own: two engines on one file, a full disk, a file that is none, what is left after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest
from fdasync_example import SqliteConfig, SqliteStore

from fdasync.cache.store.plugins import make_store
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.errors import ConfigError, StoreRejected, StoreUnavailable
from fdasync.testing import StoreTests
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.guarded_memory import value

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")


class Suite(StoreTests):
    """For its tools; a new process for each store."""

    def __init__(self, path: Path) -> None:
        self.path = path / "kv.db"

    def make(self) -> ProcessStore:
        return ProcessStore("sqlite", {"path": str(self.path)}, close_deadline_s=300.0)

    @on_loop
    async def share(self) -> None:
        async with self.on_store() as one, self.on_store() as other:
            data = value("a", 100_000)
            assert (await one.keep("a", data, 3)).status == "done"
            await other.assert_holds("a", data)
            assert (await other.keep("a", b"else")).status == "exists"
            assert await other.delete(["a"]) == 1
            assert await one.fetch("a", 100_000) == "miss"

    @on_loop
    async def watch(self) -> None:
        nbytes, versions = 2_000_000, 25
        async with self.on_store() as one, self.on_store() as other:

            async def write() -> None:
                item = one.item("a", nbytes, 20)
                for version in range(1, versions):
                    one.scribble([item], version)
                    assert (await one.put([item]))[0].status == "done"
                    assert await one.delete(["a"]) == 1

            seen = 0
            into = other.item("a", nbytes)
            writing = asyncio.ensure_future(write())
            while not writing.done():
                if (await other.get([into]))[0].status == "done":
                    seen += 1
                    found = set(other.read(into))
                    assert len(found) == 1
                    assert found <= set(range(1, versions)), "bytes of a put that was not over"
            await writing
            assert seen

    @on_loop
    async def cap(self) -> None:
        store = ProcessStore("sqlite", {"path": str(self.path), "max_nbytes": 10_000}, close_deadline_s=300.0)
        async with self.on_store(store) as on:
            for name in "abcde":
                assert (await on.keep(name, value(name, 3000))).status == "done"
            assert [await on.exists([name]) for name in "abcde"] == [0, 0, 1, 1, 1]
            assert (await on.keep("f", value("f", 9500))).status == "done"
            assert [await on.exists([name]) for name in "abcdef"] == [0, 0, 0, 0, 0, 1]
            assert (await on.keep("g", value("g", 10_001))).status == "full"
            assert await on.exists(["f"]) == 1

    @on_loop
    async def kill(self) -> None:
        async with self.on_store() as on:
            await on.keep("a", value("a", 100_000))
            assert await on.store.kill("a test")
        async with self.on_store() as on:
            await on.assert_holds("a", value("a", 100_000))

    @on_loop
    async def fill(self) -> None:
        # on the test's own loop, which an engine never does
        store = SqliteStore(SqliteConfig(path=str(self.path)))
        async with self.on_store(store) as on:
            assert store._db is not None
            store._db.execute("PRAGMA max_page_count = 100")
            assert (await on.keep("a", value("a", 100_000))).status == "done"
            outcome = await on.keep("b", value("b", 400_000))
            assert outcome.status == "full"
            assert outcome.problem
            assert await on.exists(["a", "b"]) == 1
            await on.assert_holds("a", value("a", 100_000))
            assert (await on.store.usage()).nbytes == 100_000


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.ci
def test_two_engines_share_a_file(suite: Suite) -> None:
    suite.share()


@pytest.mark.ci
def test_one_engine_never_sees_halves_of_anothers_puts(suite: Suite) -> None:
    suite.watch()


def test_the_oldest_are_dropped_for_what_is_new(suite: Suite) -> None:
    suite.cap()


@pytest.mark.ci
def test_what_was_done_survives_a_kill(suite: Suite) -> None:
    suite.kill()


def test_a_full_disk_is_told_by_the_item(suite: Suite) -> None:
    suite.fill()


def test_a_file_that_is_no_database_is_refused_and_left_alone(suite: Suite) -> None:
    suite.path.write_bytes(b"somebody's letters, and not a few of them" * 200)
    with pytest.raises(StoreRejected, match=r"kv\.db: file is not a database; name a file in a writable folder"):
        suite.share()
    assert suite.path.read_bytes().startswith(b"somebody's letters")


def test_a_file_that_somebody_has_locked_is_opened_later(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdasync_example.store._BUSY_S", 0.05)
    store = SqliteStore(SqliteConfig(path=str(suite.path)))
    with contextlib.closing(sqlite3.connect(suite.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match="locked"):
            asyncio.run(store.open([]))
        asyncio.run(store.aclose())
    again = SqliteStore(SqliteConfig(path=str(suite.path)))
    asyncio.run(again.open([]))
    assert asyncio.run(again.exists_prefix(["a"])) == 0
    asyncio.run(again.aclose())


def test_it_is_found_by_name_and_refuses_unknown_keys() -> None:
    store = make_store("sqlite", {"path": "kv.db", "max_nbytes": 5})
    assert isinstance(store, SqliteStore)
    assert store.blocking
    assert store.capabilities.capacity_nbytes == 5
    with pytest.raises(ConfigError, match="file"):
        make_store("sqlite", {"path": "kv.db", "file": "x"})
