"""A file store in a folder of its own, for tests."""

from __future__ import annotations

import pytest

from fdasync.cache.store.file.layout import Shape, parse_name
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.testing.stores.harness import StoreHooks

MIB = 1 << 20


class InFolder(StoreHooks):
    """Stores in a folder of the test."""

    sync = "none"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        self.patch = monkeypatch
        self.path = tmp_path / "store"
        self.file = tmp_path / "file"
        self.file.write_text("not a folder")

    def store(self, **config):
        return FileStore(FileConfig(**{"path": str(self.path), "sync": self.sync, **config}))

    def make(self):
        # a new place each time: runs of the state machine do not share one
        self.path = self.path.with_name(self.path.name + "x")
        return self.again(None)

    def again(self, closed):
        return self.store(max_nbytes=256 * MIB, segment_nbytes=MIB)

    def make_capped(self, max_nbytes):
        return self.store(max_nbytes=max_nbytes)

    def make_broken(self):
        return self.store(path=str(self.file))

    def slots(self, count, nbytes):
        """A cap for exactly so many objects of a size."""
        return Shape(-(-nbytes // 4096) * 4096, count, 1).nbytes

    def segments(self):
        return sorted(path for path in self.path.iterdir() if parse_name(path.name))

    def disk_nbytes(self):
        return sum(path.stat().st_size for path in self.segments())
