"""Whether some order of the calls of a meeting, one after the other, gives the results and the state that came of it.

`model.py` says what each call does. A call that met another may be refused; a cancelled one may have had its effect or
none. Called by `meetings.py`.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from tests.support.weights_play.calls import CALLS
from tests.support.weights_play.model import WeightsModel
from tests.support.weights_play.play import FIRST

if TYPE_CHECKING:
    from collections.abc import Sequence

Effect = Literal["all", "nothing", "cut"]
_EFFECTS: tuple[Effect, ...] = get_args(Effect)


class Made(NamedTuple):
    """A call as it came.

    Attributes:
        caller, number: which one.
        begun, ended: turns.
        result: "", an error's name, or "cancelled".
    """

    caller: int
    number: int
    name: str
    begun: int
    ended: int
    result: str


class State(NamedTuple):
    """What an engine, or all engines of a fleet, say of themselves when nothing is under way.

    Attributes:
        paused: its scheduler plans no step.
        weights: the number of the runner's; None: they are not all in place.
    """

    doing: str
    paused: bool
    asleep: bool
    released: frozenset[str]
    version: str
    weights: int | None
    joined: bool


class Outcome(NamedTuple):
    """What came of a meeting.

    Attributes:
        lapses: it took so long that an update in parts, which nobody goes on with, ends.
        merges: see `Stage`.
    """

    made: tuple[Made, ...]
    state: State
    lapses: bool
    merges: bool


def explained(outcome: Outcome) -> bool:
    """Whether some order of the calls gives these results and this state."""
    made = outcome.made
    for order in permutations(range(len(made))):
        if not _may_follow(made, order):
            continue
        choices = [_effects_of(outcome, made[at]) for at in order]
        if any(_gives(outcome, order, effects) for effects in product(*choices)):
            return True
    return False


def _effects_of(outcome: Outcome, one: Made) -> tuple[Effect, ...]:
    if one.result == "cancelled":
        return _EFFECTS
    if one.result == "WeightsRejected" and _is_refused(outcome, one):
        # a join that a leave ended may have left the group that was joined before
        return ("all", "cut")
    may_do_nothing = _is_undone(outcome, one) or _is_merged(outcome, one, outcome.made)
    return ("all", "nothing") if may_do_nothing else ("all",)


def _may_follow(made: tuple[Made, ...], order: tuple[int, ...]) -> bool:
    """No call comes before one that had ended when it began. The work of a cancelled call goes on for a while."""
    for place, later in enumerate(order):
        for earlier in order[place + 1 :]:
            one, other = made[earlier], made[later]
            if one.caller == other.caller and one.number < other.number and one.result != "cancelled":
                return False
            if one.ended < other.begun and one.result != "cancelled":
                return False
    return True


def _gives(outcome: Outcome, order: tuple[int, ...], effects: tuple[Effect, ...]) -> bool:
    model = WeightsModel(FIRST)
    model.sources = (f"w-{FIRST}",)
    before: list[Made] = []
    for at, effect in zip(order, effects, strict=True):
        one = outcome.made[at]
        call = CALLS[one.name]
        if effect == "cut" and call.cut is not None:
            call.cut(model)
        if effect == "all" and not _is_refused(outcome, one) and call.told(model) != one.result != "cancelled":
            return False
        is_undone = one.result == "cancelled" or _is_undone(outcome, one)
        if effect == "nothing" and not is_undone and not _is_merged(outcome, one, before):
            return False
        before.append(one)
    if state_of(model) != outcome.state and outcome.lapses:
        model.abandon()
    return state_of(model) == outcome.state


def _is_refused(outcome: Outcome, one: Made) -> bool:
    """Whether a call did nothing because it met another."""
    if one.result == "UpdateUnderWay":
        return CALLS[one.name].is_refused and _met(outcome.made, one)
    return one.result == "WeightsRejected" and _met(outcome.made, one, CALLS[one.name].ended_by)


def _is_undone(outcome: Outcome, one: Made) -> bool:
    undone_by = CALLS[one.name].undone_by
    return bool(undone_by) and _met(outcome.made, one, undone_by)


def _is_merged(outcome: Outcome, one: Made, others: Sequence[Made]) -> bool:
    """Whether a call may have been one with an equal call of these that it met."""
    return (
        outcome.merges
        and CALLS[one.name].merges
        and any(
            other is not one and (other.name, other.result) == (one.name, one.result) and _met((other, one), other)
            for other in others
        )
    )


def _met(made: tuple[Made, ...], one: Made, name: str | None = None) -> bool:
    """Whether a call was made while another had not ended; `name`: one of this name."""
    return any(
        other is not one
        and name in (None, other.name)
        and other.begun <= one.ended
        and (other.ended >= one.begun or other.result == "cancelled")
        for other in made
    )


def state_of(model: WeightsModel) -> State:
    weights = model.number if model.doing in ("running", "paused") else None
    return State(
        doing=model.doing,
        paused=model.doing != "running",
        asleep=model.sleeps,
        released=frozenset(model.released),
        version=str(model.version),
        weights=weights,
        joined=model.joined,
    )
