"""What control calls have made of an engine, as one state, and what each call may do in it.

One change is under way at a time: a load, a join, a sleep and so on. `CALLS` says which change a call begins, and where
it is refused; `NEXT` says what follows a change. docs/weights.md has both as tables, and a test compares them. Knows no
task, no runner and no schedule. Changed by the other modules of this room; read by `engine/engine.py` and
`fdasync_fleet/instance`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from fdasync.errors import Asleep, BadInput, UpdateUnderWay

if TYPE_CHECKING:
    from fdasync.engine.weights.state import WeightsState
    from fdasync.errors import WeightsBroken
    from fdasync.request import Doing, MemoryPart

Change = Literal[
    "nothing", "reaching", "meeting", "leaving", "loading", "hashing", "beginning", "open", "receiving",
    "falling_asleep", "waking", "closing",
]  # fmt: skip
WeightsAre = Literal["in_place", "dropped", "broken", "differs"]
CHANGES: tuple[Change, ...] = get_args(Change)
WEIGHTS_ARE: tuple[WeightsAre, ...] = get_args(WeightsAre)

#: of an update in parts
PARTS: tuple[Change, ...] = ("beginning", "open", "receiving")
#: of weights and groups; no step is planned meanwhile
UPDATES: tuple[Change, ...] = ("meeting", "leaving", "loading", "hashing", *PARTS)
SLEEPS: tuple[Change, ...] = ("falling_asleep", "waking")
_BEGUN: tuple[Change, ...] = ("reaching", "leaving", "loading", "hashing", "beginning", *SLEEPS)

#: what may follow a change, beside "closing", behind which nothing comes
NEXT: dict[Change, tuple[Change, ...]] = {
    "nothing": _BEGUN,
    "reaching": ("meeting", "nothing"),
    "meeting": ("nothing",),
    "leaving": ("nothing",),
    "loading": ("nothing",),
    "hashing": ("nothing",),
    "beginning": ("open", "nothing"),
    "open": ("receiving", "loading", "nothing"),
    "receiving": ("open", "nothing"),
    "falling_asleep": ("nothing",),
    "waking": ("nothing",),
    "closing": (),
}


class Rule(NamedTuple):
    """What a call may do.

    Attributes:
        begins: the change that it makes; "nothing": it is done at once.
        during: changes during which it may; otherwise it raises UpdateUnderWay.
        behind: changes for whose end it waits.
        weights: what they may be; otherwise it raises why they are broken, or Asleep.
        memory: it needs the weights' memory; otherwise it raises Asleep.
        of_parts: it goes on with an update in parts; otherwise it raises BadInput.
    """

    begins: Change
    during: tuple[Change, ...] = ("nothing",)
    behind: tuple[Change, ...] = ()
    weights: tuple[WeightsAre, ...] = WEIGHTS_ARE
    memory: bool = False
    of_parts: bool = False


_USABLE: tuple[WeightsAre, ...] = ("in_place", "dropped")
_AT_ONCE = tuple([change for change in CHANGES if change != "closing"])
#: by the engine's methods; a part is a call of `update_weights` while an update in parts is open
CALLS: dict[str, Rule] = {
    "pause": Rule("nothing", _AT_ONCE),
    "resume": Rule("nothing", _AT_ONCE, weights=_USABLE),
    "update_weights": Rule("loading", memory=True),
    "begin_weight_update": Rule("beginning", memory=True),
    "part": Rule("receiving", ("open",), of_parts=True),
    "end_weight_update": Rule("loading", ("open",), of_parts=True),
    "abandon_weight_update": Rule("nothing", tuple([one for one in _AT_ONCE if one not in ("beginning", "receiving")])),
    "set_weight_version": Rule("nothing", ("nothing", *SLEEPS), weights=_USABLE),
    "weights_fingerprint": Rule("hashing", weights=("in_place",), memory=True),
    "join_weights_group": Rule("reaching"),
    # it ends a join of this group first
    "leave_weights_group": Rule("leaving"),
    "sleep": Rule("falling_asleep", behind=SLEEPS, weights=_USABLE),
    "wake": Rule("waking", behind=SLEEPS),
}


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


class Control:
    """See the module.

    Args:
        state: of the weights; its label is in the words of an error.

    Attributes:
        change: what is under way. "reaching": of a join, steps go on until somebody answers; "open": an update in parts
            waits for its next part; "closing": the engine ends.
        joining: the group, while it is "reaching" or "meeting".
        weights: "dropped": a sleep dropped them, and nothing has brought any since; "broken": they cannot be used;
            "differs": they cannot, and are whole: only a comparison failed, so that the runner knows of nothing wrong.
        broken: why they cannot be used; None while they can.
        sleeps: a sleep keeps the engine from going on.
        released: the parts whose memory is not there.
        held: a pause has returned, and no resume came since.
    """

    def __init__(self, state: WeightsState) -> None:
        self._state = state
        self.change: Change = "nothing"
        self.joining: Joining | None = None
        self.weights: WeightsAre = "in_place"
        self.broken: WeightsBroken | None = None
        self.sleeps = self.held = False
        self.released: tuple[MemoryPart, ...] = ()

    @property
    def doing(self) -> Doing:
        """What the engine does, in one word; all but "running" keep it from planning steps."""
        if self.change == "waking":
            return "waking"
        if self.sleeps:
            return "asleep"
        if self.updating:
            return "updating"
        if self.broken is not None:
            return "broken"
        if self.weights == "dropped":
            return "waits_for_weights"
        return "paused" if self.held else "running"

    @property
    def updating(self) -> bool:
        """An update is under way, and may read its caller's buffers, or the ranks of a group meet or part."""
        return self.change in UPDATES

    @property
    def in_parts(self) -> bool:
        """An update in parts is under way."""
        return self.change in PARTS

    @property
    def may_go_on(self) -> bool:
        """Whether nothing but calls of `pause` that have not returned keeps the engine from planning steps."""
        return self.change in ("nothing", "reaching") and self.doing == "running"

    def check(self, call: str) -> None:
        """Raise the error by which a call is refused, unless it may begin, or must wait (`waits`)."""
        rule = CALLS[call]
        if self.broken is not None and self.weights not in rule.weights:
            raise self.broken
        if rule.of_parts and not self.in_parts:
            raise BadInput(call, "no update is open", hint="it begins with begin_weight_update")
        if self.change not in rule.during and self.change not in rule.behind:
            raise self._under_way()
        if rule.memory and "weights" in self.released:
            raise Asleep(call, self.released)
        if self.weights not in rule.weights:
            raise Asleep(call, ("weights",))

    def waits(self, call: str) -> bool:
        """Whether it must wait for the change that is under way."""
        return self.change in CALLS[call].behind

    def move(self, change: Change) -> None:
        """This change is under way now; an engine that ends stays at that."""
        if self.change == "closing":
            return
        assert change == "closing" or change in NEXT[self.change], (self.change, change)
        self.change = change
        if change not in ("reaching", "meeting"):
            self.joining = None

    def breaks(self, error: WeightsBroken, *, differs: bool = False) -> None:
        """The weights cannot be used any more."""
        self.broken, self.weights = error, "differs" if differs else "broken"

    def mends(self) -> None:
        """Weights are in place."""
        self.broken, self.weights = None, "in_place"

    def _under_way(self) -> UpdateUnderWay:
        where = "of this engine"
        if self.joining is not None:
            return UpdateUnderWay(f"{where}: {self.joining.words}", "a join of a trainer's group is under way")
        if self.in_parts:
            return UpdateUnderWay(f"{where}: one in parts is open, and version {self._state.version} is in use")
        if self.change in SLEEPS:
            return UpdateUnderWay(where, "a sleep or a wake is under way")
        return UpdateUnderWay(where)
