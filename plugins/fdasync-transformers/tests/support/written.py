"""Tiny checkpoints in folders, each made once a process and written from memory afterwards: tests that damage or update
one get files of their own, and need not wait for a model to be made and saved."""

from __future__ import annotations

import pickle
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint


def write_tiny_checkpoint(folder: Path, family: str, seed: int = 0, *, shards: bool = False, **overrides: Any) -> None:
    """What `make_tiny_checkpoint` writes, without the model that it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _files(family, seed, shards, pickle.dumps(overrides)).items():
        (folder / name).write_bytes(data)


@lru_cache(maxsize=64)
def _files(family: str, seed: int, shards: bool, overrides: bytes) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        make_tiny_checkpoint(folder, family, seed, shards=shards, **pickle.loads(overrides))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
