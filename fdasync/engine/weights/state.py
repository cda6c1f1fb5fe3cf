"""The label of the weights in use, its order, and the folders that they came from.

Holds facts and decides nothing. Written by the other modules of this room; read by `engine/engine.py` and
`fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.request import checked_version, next_order, next_version

if TYPE_CHECKING:
    from collections.abc import Callable

#: deltas on one checkpoint, beyond which a sleep that drops the weights needs an update: a wake loads each of them
MOST_DELTAS = 64


class WeightsState:
    """See the module.

    Args:
        version: the label that the engine starts with.
        folder: that they came from; "": the runner needs none, and they cannot be loaded again.
        changed: called when the weights or their label have changed; None: nothing is.

    Attributes:
        version: the caller's label of the weights in use.
        order: of that label among all weights and labels that were in use (`request.next_order`).
        goes_on: the label of the last update by a group, if callers have kept the engine paused since before that
            update; else None.
        sources: folders that the weights in use came from: a checkpoint, and deltas applied to it since, in their
            order. (): they cannot be loaded again: tensors of an update are among them, there would be more than
            `MOST_DELTAS` deltas, the runner needs no folder, or the weights are broken.
        is_delta: the update that brought the weights in use was a delta to the weights before.
    """

    def __init__(self, version: str, folder: str, changed: Callable[[], None] | None = None) -> None:
        self.version = version
        self.order = next_order(-1, version)
        self.goes_on: str | None = None
        self.sources: tuple[str, ...] = (folder,) if folder else ()
        self.is_delta = False
        self._changed = changed

    def came_from(self, folder: str, *, is_delta: bool) -> None:
        """The weights in use came from this folder; "": from tensors."""
        self.is_delta = is_delta
        if not is_delta:
            self.sources = (folder,) if folder else ()
        else:
            self.sources = (*self.sources, folder) if 0 < len(self.sources) <= MOST_DELTAS else ()

    def new_label(self, version: str | int | None, *, goes_on: bool = False) -> str:
        """The label of new weights; None: the label that follows the one in use. Raises BadInput if it is no label.

        Args:
            goes_on: without a version, these tensors may continue an update whose first tensors came before.
        """
        if version is not None:
            return checked_version(version)
        return self.goes_on if goes_on and self.goes_on is not None else next_version(self.version)

    def take_label(self, label: str, order: int) -> None:
        """The weights in use have this label and order from now on; order 0: they keep their order."""
        self.version, self.order = label, order or self.order
        if self._changed is not None:
            self._changed()
