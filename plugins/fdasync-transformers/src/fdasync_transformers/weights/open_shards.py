"""Reads tensors, or parts of them, from the shards of a checkpoint.

Knows files; knows no models and no names. Opened by `loading.py` and `ties.py`; read by `reading.py` and the layouts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self, TypeVar

from safetensors import SafetensorError, safe_open

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

T = TypeVar("T")


class OpenShards:
    """Files opened when they are first read; a context manager, which closes them. Every verb raises CheckpointError
    naming the file."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        files = list(self._open.values())
        self._open.clear()
        for file in files:
            file.__exit__(None, None, None)

    def names(self, path: Path) -> list[str]:
        """Names of the tensors of a file."""
        return self._read(path, lambda file: list(file.keys()))

    def tensor(self, path: Path, key: str) -> torch.Tensor:
        """A stored tensor, whole."""
        return self._tensor(path, lambda file: file.get_tensor(key))

    def rows(self, path: Path, key: str, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` (exclusive) of a stored tensor's first dimension."""
        return self._tensor(path, lambda file: file.get_slice(key)[first:last])

    def columns(self, path: Path, key: str, first: int, last: int) -> torch.Tensor:
        """Columns `first` to `last` (exclusive) of a stored matrix."""
        return self._tensor(path, lambda file: file.get_slice(key)[:, first:last])

    def _tensor(self, path: Path, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return self._read(path, read)

    def _read(self, path: Path, read: Callable[[Any], T]) -> T:
        try:
            if path not in self._open:
                opened: Any = safe_open(path, framework="pt")
                self._open[path] = opened.__enter__()
            return read(self._open[path])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(path), f"cannot be read: {error}") from error


def bands(shape: tuple[int, ...], nbytes: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) index of the first dimension, so that a band in float32 takes about `nbytes`."""
    count = max(1, nbytes // max(1, 4 * math.prod(shape[1:])))
    for first in range(0, shape[0], count):
        yield first, min(first + count, shape[0])
