"""A tiny family as the checks of one test take it: its model and its checkpoints, each made once."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fdasync_transformers.tiny.checkpoints import make_tiny_model
from written import write_tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


class Made:
    """
    Args:
        family: a name of the catalogue.
        root: an empty folder, for its checkpoints.
    """

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self._root = root
        self._models: dict[int, Any] = {}

    def model(self, seed: int = 0) -> Any:
        """As of `make_tiny_model`: the caller's own."""
        if seed not in self._models:
            self._models[seed] = make_tiny_model(self.family, seed)
        return copy.deepcopy(self._models[seed])

    def folder(self, seed: int = 0, *, shards: bool = False) -> Path:
        """Of `make_tiny_checkpoint`'s files: to be read, never to be changed."""
        folder = self._root / f"{'shards' if shards else 'file'}-{seed}"
        if not folder.exists():
            write_tiny_checkpoint(folder, self.family, seed, shards=shards)
        return folder
