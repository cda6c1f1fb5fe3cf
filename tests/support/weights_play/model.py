"""What must hold after each call that changes an engine's weights or memory, worked out from the calls alone.

Weights are numbers of two halves; a folder is named by what it holds ("w-7", or "d-5-7": a delta from 5 to 7). A call's
method changes the model and returns the names of the errors that the call may end with; "": it succeeds. Knows no
engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tests.support.broadcast_runner import HALF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync import Doing

LOW, HIGH = 1, 2
WHOLE = LOW | HIGH
PARTS = ("weights", "kv_cache", "cuda_graph")
MOST_DELTAS = 3
Compared = Literal["not", "right", "wrong"]


def mixed(old: int, new: int, halves: int) -> int:
    low = new % HALF if halves & LOW else old % HALF
    high = new // HALF if halves & HIGH else old // HALF
    return low + high * HALF


class WeightsModel:
    """See the module.

    Attributes:
        number: of the weights that requests use.
        version: their label.
        identity: of blocks: what it follows from, or that it is a random one, the how manieth.
        holds: the number of what the runner holds; of no use while it owes all.
        owes: halves that the next update must bring.
    """

    def __init__(self, number: int) -> None:
        self.number = self.holds = number
        self.version = 0
        self.identity = ("of", number)
        self._random = 0
        self.owes = 0
        self.held = self.sleeps = self.dropped = self.joined = False
        self.broken: Literal["", "WeightsBroken", "WeightsDiffer"] = ""
        self.released: set[str] = set()
        self.sources: tuple[str, ...] = ()
        self.gone: set[str] = set()
        self.open: int | None = None
        # the last update was a group's, in the pause that is there
        self.goes_on = False
        self._came = self._missing = 0

    @property
    def doing(self) -> Doing:
        if self.sleeps:
            return "asleep"
        if self.open is not None:
            return "updating"
        if self.broken:
            return "broken"
        if self.dropped:
            return "waits_for_weights"
        return "paused" if self.held else "running"

    # -- pauses, labels, groups -----------------------------------------------------------------------

    def pause(self, mode: str) -> str:
        if mode == "wait" and self.open is not None:
            # it waits for the end of the update, with which nobody goes on
            self._close("")
        self.held = True
        return ""

    def resume(self) -> str:
        if not self.broken:
            self.held = self.goes_on = False
        return self.broken

    def relabel(self, version: int) -> str:
        # the open update's weights will have this label, as a part of it said
        if self.open is not None and version == self._label:
            return ""
        if self.broken:
            return self.broken
        if self.open is not None:
            return "UpdateUnderWay"
        self.version = version
        return ""

    def join(self) -> str:
        if self.open is not None:
            return "UpdateUnderWay"
        self.joined = True
        return ""

    def leave(self) -> str:
        if self.open is not None:
            return "UpdateUnderWay"
        self.joined = False
        return ""

    # -- whole updates ----------------------------------------------------------------------------------

    def folder(self, name: str, compared: Compared, version: int | None = None) -> str:
        """`version`: the label; None: the next one."""
        if error := self._cannot_update():
            return error
        *base, number = [int(word) for word in name.split("-")[1:]]
        chain = self.sources if self.dropped and name in self.sources[-1:] else (name,)
        if self.gone & {name, *chain}:
            return "WeightsRejected"
        if version == self.version and not self.dropped and not self.broken and self.identity == ("of", number):
            # it is compared, and not loaded
            if compared == "wrong":
                return "BadInput"
            self.sources = self.sources if base else (name,)
            self.goes_on = False
            return ""
        if base and len(chain) == 1 and (self.owes or self.holds != base[0]):
            return "WeightsRejected"
        self.holds, self.owes = number, 0
        return self._loaded(compared, chain, is_delta=bool(base), version=version)

    def tensors(self, number: int, halves: int, compared: Compared, version: int | None = None) -> str:
        if error := self._cannot_update():
            return error
        self._forget(compared)
        if self.owes & ~halves:
            return "WeightsRejected"
        self.holds, self.owes = mixed(self.holds, number, halves), 0
        return self._loaded(compared, version=version)

    def group(self, number: int, halves: int, *, dies: bool, version: int | None = None) -> str:
        if error := self._cannot_update():
            return error
        self._forget("not")
        if not self.joined or self.owes & ~halves:
            self.joined = False
            return "WeightsRejected"
        if dies:
            self.joined = False
            self.owes |= halves
            return self._breaks("WeightsBroken")
        self.holds, self.owes = mixed(self.holds, number, halves), 0
        return self._loaded("not", by_group=True, version=version)

    def _cannot_update(self) -> str:
        if self.open is not None:
            return "UpdateUnderWay"
        return "Asleep" if "weights" in self.released else ""

    def _forget(self, compared: Compared) -> None:
        if self.broken == "WeightsDiffer" and compared == "not":
            self.owes = WHOLE

    def _breaks(self, error: Literal["WeightsBroken", "WeightsDiffer"]) -> str:
        self.broken, self.sources = error, ()
        return error

    def _loaded(
        self,
        compared: Compared,
        folders: tuple[str, ...] = (),
        *,
        is_delta: bool = False,
        by_group: bool = False,
        version: int | None = None,
    ) -> str:
        if compared == "wrong":
            return self._breaks("WeightsDiffer")
        if not is_delta or len(folders) > 1:
            self.sources = folders
        else:
            self.sources = (*self.sources, *folders) if 0 < len(self.sources) <= MOST_DELTAS else ()
        self.number = self.holds
        self._random += 1
        self.identity = ("of", self.holds) if folders or compared == "right" else ("random", self._random)
        self.dropped, self.broken = False, ""
        if version is not None:
            self.version = version
        elif not (by_group and self.goes_on):
            self.version += 1
        self.goes_on = by_group and self.held
        return ""

    # -- updates in parts -------------------------------------------------------------------------------

    def begin(self) -> str:
        if error := self._cannot_update():
            return error
        self.open = 0
        self._label: int | None = None
        return ""

    def part(self, number: int, halves: int, *, dies: bool, version: int | None = None) -> str:
        assert self.open is not None
        if not self.open:
            if self.broken == "WeightsDiffer":
                self.owes = WHOLE
            self._came, self._missing = 0, self.owes
        if not self.joined:
            return self._close("WeightsRejected")
        self.owes |= halves
        if version is not None:
            self._label = version
        if dies:
            self.joined, self.open = False, None
            return self._breaks("WeightsBroken")
        self.holds = mixed(self.holds, number, halves)
        self._came |= halves
        self.open += 1
        return ""

    def end(self, compared: Compared) -> str:
        if self.open is None:
            return "BadInput"
        parts, self.open = self.open, None
        if not parts:
            return ""
        if self._missing & ~self._came:
            return self._breaks("WeightsBroken")
        self.owes = 0
        return self._loaded(compared, version=self._label)

    def abandon(self) -> str:
        if self.open is not None:
            self._close("")
        return ""

    def _close(self, error: str) -> str:
        parts, self.open = self.open, None
        if not parts:
            return error
        broke = self._breaks("WeightsBroken")
        return broke if error else ""

    # -- sleep and wake ---------------------------------------------------------------------------------

    def sleep(self, level: int, tags: Sequence[str] | None) -> str:
        if self.broken:
            return self.broken
        if self.open is not None:
            return "UpdateUnderWay"
        parts = set(PARTS if tags is None else tags) if level else set()
        self.sleeps = True
        if level == 2 and "weights" in parts:
            self.dropped, self.owes = True, WHOLE
        self.released |= parts
        return ""

    def wake(self, tags: Sequence[str] | None, fails: int) -> str:
        if self.open is not None:
            return "UpdateUnderWay"
        if not self.sleeps and not self.dropped:
            return ""
        for part in PARTS:
            # graphs need all others, and come with the last of them
            wanted = self.released == {part} if part == "cuda_graph" else part in (tags or PARTS)
            if wanted and part in self.released:
                if fails:
                    return "WakeFailed"
                self.released.remove(part)
        if self.released:
            return ""
        self.sleeps = False
        if self.dropped and self.sources:
            if self.gone & set(self.sources):
                return "WeightsRejected"
            self.holds, self.owes = self.number, 0
            self.dropped = False
        return ""
