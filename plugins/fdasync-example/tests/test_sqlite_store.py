"""The whole proof of a store: the conformance suite, on the store as engines run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.testing import StoreTests

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.cache.store import Store


@pytest.mark.ci
class TestSqlite(StoreTests):
    slow_to_open = True  # each starts a process

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self, **config: Any) -> Store:
        return ProcessStore("sqlite", {"path": str(self.path / "kv.db"), **config}, close_deadline_s=300.0)

    def again(self, closed: Store) -> Store:
        return self.make()

    def make_capped(self, max_nbytes: int) -> Store:
        return self.make(max_nbytes=max_nbytes)

    def make_broken(self) -> Store:
        return self.make(path=str(self.path / "no" / "such" / "folder" / "kv.db"))
