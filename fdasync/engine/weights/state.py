"""What the parts of this room know together: the weights in use, their labels, and what keeps the engine from going on.

Holds facts and decides nothing. Written by the other modules of this room; read by `engine/engine.py` and
`fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import Asleep, UpdateUnderWay
from fdasync.request import checked_version, next_order, next_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.errors import WeightsBroken
    from fdasync.request import Doing, MemoryPart

#: deltas on one checkpoint, beyond which a sleep that drops the weights needs an update: a wake loads each of them
MOST_DELTAS = 64


class Joining(NamedTuple):
    """A join of a trainer's group that is under way.

    Attributes:
        name: of the group.
        store: where the trainer's store should be, "ADDRESS:PORT".
        until: by the loop's clock: by then the ranks have met, or the join has failed.
    """

    name: str
    store: str
    until: float

    @property
    def words(self) -> str:
        left_s = max(self.until - asyncio.get_running_loop().time(), 0.0)
        return (
            f"it joins the group {self.name!r} by {self.store}, for up to {left_s:.0f} s more unless that group is left"
        )


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
            `MOST_DELTAS` deltas, or the runner needs no folder.
        is_delta: the update that brought the weights in use was a delta to the weights before.
        broken: why the weights cannot be used; None while they can.
        differs: they are broken, and whole: only a comparison failed, so that the runner knows of nothing wrong.
        dropped: a sleep dropped the weights, and no update or reload has brought any since: nothing goes on.
        held: a pause has returned, and no resume came since.
        updating: an update is under way, and may read its caller's buffers, or the ranks of a group meet or part.
        joining: a group that is being joined; steps go on until its ranks meet. None: none is.
        is_open: an update in parts has begun and not ended.
        sleeps: a sleep keeps the engine from going on.
        moving: a sleep or a wake is under way, and no update may begin.
        waking: it is a wake.
        released: the parts whose memory is not there.
        closing: the engine ends: nothing goes on any more.
    """

    def __init__(self, version: str, folder: str, changed: Callable[[], None] | None = None) -> None:
        self.version = version
        self.order = next_order(-1, version)
        self.goes_on: str | None = None
        self.sources: tuple[str, ...] = (folder,) if folder else ()
        self.is_delta = self.differs = False
        self.broken: WeightsBroken | None = None
        self.dropped = self.held = self.updating = self.is_open = False
        self.sleeps = self.moving = self.waking = self.closing = False
        self.released: tuple[MemoryPart, ...] = ()
        self.joining: Joining | None = None
        self._changed = changed

    @property
    def doing(self) -> Doing:
        """What the engine does, in one word; all but "running" keep it from planning steps."""
        if self.waking:
            return "waking"
        if self.sleeps:
            return "asleep"
        if self.updating:
            return "updating"
        if self.broken is not None:
            return "broken"
        if self.dropped:
            return "waits_for_weights"
        return "paused" if self.held else "running"

    def breaks(self, error: WeightsBroken, *, differs: bool = False) -> WeightsBroken:
        """The weights cannot be used any more; returns why."""
        self.broken, self.differs, self.sources = error, differs, ()
        return error

    def came_from(self, folder: str, *, is_delta: bool) -> None:
        """The weights in use came from this folder; "": from tensors."""
        self.is_delta = is_delta
        if not is_delta:
            self.sources = (folder,) if folder else ()
        else:
            self.sources = (*self.sources, folder) if 0 < len(self.sources) <= MOST_DELTAS else ()

    def check_idle(self) -> None:
        """Raise unless no update is under way, and no group is being joined."""
        if self.joining is not None:
            raise UpdateUnderWay(f"of this engine: {self.joining.words}", "a join of a trainer's group is under way")
        if self.is_open:
            raise self.under_way()
        if self.updating:
            raise UpdateUnderWay("of this engine")

    def under_way(self) -> UpdateUnderWay:
        """An update in parts is open."""
        return UpdateUnderWay(f"of this engine: one in parts is open, and version {self.version} is in use")

    def check_still(self) -> None:
        """Raise unless no sleep and no wake is under way."""
        if self.moving:
            raise UpdateUnderWay("of this engine", "a sleep or a wake is under way")

    def check_awake(self, call: str) -> None:
        """Raise unless the weights' memory is there to stay."""
        self.check_still()
        if "weights" in self.released:
            raise Asleep(call, self.released)

    # -- labels ---------------------------------------------------------------------------------------

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
