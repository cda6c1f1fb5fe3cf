"""What control calls have made of an engine, as a machine: every state that can be reached, and every call in it.

The moves below are what the modules of `engine/weights` do with `Control`, without their work: a load that succeeds, is
refused, or breaks, and so on.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from fdasync.engine.weights.control import CALLS, CHANGES, NEXT, PARTS, WEIGHTS_ARE, Control
from fdasync.errors import Asleep, BadInput, FdasyncError, UpdateUnderWay, WeightsBroken
from fdasync.request import Doing, MemoryPart
from tests.support.control_table import new_control, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Move = Callable[[Control], None]

_BROKEN = WeightsBroken("they are")
_MEMORY: tuple[MemoryPart, ...] = get_args(MemoryPart)
_RELEASED = [parts for size in range(len(_MEMORY) + 1) for parts in itertools.combinations(_MEMORY, size)]
State = tuple[object, ...]


def state_of(control: Control) -> State:
    return control.change, control.weights, control.sleeps, control.released, control.held


def copy_of(control: Control) -> Control:
    other = new_control()
    other.__dict__.update(control.__dict__)
    return other


def all_states() -> Iterator[Control]:
    """Also such as no calls lead to."""
    for change, weights, sleeps, released, held in itertools.product(
        CHANGES, WEIGHTS_ARE, (False, True), _RELEASED, (False, True)
    ):
        control = new_control()
        if weights in ("broken", "differs"):
            control.breaks(_BROKEN, differs=weights == "differs")
        control.change, control.weights, control.sleeps, control.held = change, weights, sleeps, held
        control.released = released
        yield control


def refusal(control: Control, call: str) -> type[FdasyncError] | None:
    try:
        control.check(call)
    except FdasyncError as error:
        return type(error)
    return None


def calls_of(control: Control) -> dict[str, Move]:
    """What each call that is taken makes of the state at once; a call that waits makes nothing."""
    moves: dict[str, Move] = {}
    for call, rule in CALLS.items():
        if refusal(control, call) is not None or control.waits(call):
            continue
        if call == "wake" and not control.sleeps and control.weights != "dropped":
            continue
        if rule.begins != "nothing":
            moves[call] = lambda control, change=rule.begins: control.move(change)
        elif call == "abandon_weight_update" and control.change == "open":
            moves[call] = _end
            moves["abandon_weight_update, after parts"] = lambda control: (control.breaks(_BROKEN), _end(control))
    if "resume" not in moves and refusal(control, "resume") is None:
        moves["resume"] = lambda control: setattr(control, "held", False)
    moves["pause"] = lambda control: setattr(control, "held", True)
    return moves


def _end(control: Control) -> None:
    control.move("nothing")


def ends_of(control: Control) -> dict[str, Move]:
    """What may come of the change that is under way."""

    def ends(do: Callable[[Control], object]) -> Move:
        return lambda control: (do(control), _end(control))

    done: dict[str, Move] = {"is done": _end}
    breaks = {"breaks": ends(lambda control: control.breaks(_BROKEN))}
    differs = {"differs": ends(lambda control: control.breaks(_BROKEN, differs=True))}
    match control.change:
        case "nothing" | "closing":
            return {}
        case "reaching":
            return {"is reached": lambda control: control.move("meeting"), "is not reached": _end}
        case "loading":
            return {"is loaded": ends(Control.mends), "is refused": _end, **breaks, **differs}
        case "beginning":
            return {"has begun": lambda control: control.move("open"), "is cancelled": _end}
        case "receiving":
            return {"has come": lambda control: control.move("open"), "is refused": _end, **breaks}
        case "open":
            return {"lapses": _end, "lapses after parts": breaks["breaks"]}
        case "falling_asleep":
            moves: dict[str, Move] = {}
            for parts, drops in itertools.product(_RELEASED, (False, True)):
                if not drops or "weights" in parts:
                    moves[f"released {parts}, drops {drops}"] = ends(
                        lambda control, parts=parts, drops=drops: _sleeps(control, parts, drops)
                    )
            return moves
        case "waking":
            moves = {
                f"brought back {parts}": ends(lambda control, parts=parts: _took(control, parts)) for parts in _RELEASED
            }
            if not control.released and control.weights == "dropped":
                moves |= {"reloads": ends(_reloads), **breaks, **differs}
            return moves
    return done


def _sleeps(control: Control, parts: tuple[MemoryPart, ...], drops: bool) -> None:
    control.sleeps = True
    control.released = tuple([part for part in _MEMORY if part in (*control.released, *parts)])
    control.weights = "dropped" if drops else control.weights


def _took(control: Control, parts: tuple[MemoryPart, ...]) -> None:
    control.released = tuple([part for part in control.released if part not in parts])
    control.sleeps = bool(control.released)


def _reloads(control: Control) -> None:
    control.sleeps = False
    control.mends()


def reachable() -> dict[State, Control]:
    found = {state_of(new_control()): new_control()}
    todo = list(found.values())
    while todo:
        control = todo.pop()
        for move in [*calls_of(control).values(), *ends_of(control).values()]:
            other = copy_of(control)
            move(other)
            if state_of(other) not in found:
                found[state_of(other)] = other
                todo.append(other)
    return found


def test_every_call_is_taken_or_refused_by_one_error_in_every_state() -> None:
    count = 0
    for control, call in itertools.product(all_states(), CALLS):
        before = state_of(control)
        error = refusal(control, call)
        assert error in (None, UpdateUnderWay, BadInput, Asleep, WeightsBroken)
        assert state_of(control) == before
        if control.change == "closing":
            # the engine's own state refuses all calls
            assert error in (UpdateUnderWay, BadInput, WeightsBroken), call
        elif error is None and not control.waits(call) and CALLS[call].begins != "nothing":
            assert CALLS[call].begins in NEXT[control.change]
        count += 1
    assert count == len(CHANGES) * len(WEIGHTS_ARE) * 2 * len(_RELEASED) * 2 * len(CALLS)


def test_what_holds_in_every_state_that_calls_lead_to() -> None:
    states = reachable()
    # of an enumeration that goes nowhere nothing is learnt
    assert {control.change for control in states.values()} == set(CHANGES) - {"closing"}
    assert {control.doing for control in states.values()} == set(get_args(Doing))
    for control in states.values():
        assert (control.broken is not None) == (control.weights in ("broken", "differs"))
        assert control.sleeps or not control.released
        if control.change in ("hashing", "loading", *PARTS):
            assert "weights" not in control.released
        if control.change == "hashing":
            assert control.weights == "in_place"
        if control.change == "falling_asleep":
            assert control.weights in ("in_place", "dropped")
        assert control.may_go_on == (control.doing == "running" and control.change in ("nothing", "reaching"))
        assert refusal(control, "pause") is None


def test_from_every_state_calls_lead_back_to_one_that_goes_on() -> None:
    """No call's end is needed but its success."""
    wanted = {
        "loading": "is loaded",
        "receiving": "has come",
        "open": "",
        "beginning": "has begun",
        "reaching": "is not reached",
        "falling_asleep": f"released {()}, drops False",
        "waking": f"brought back {_MEMORY}",
    }
    for state in reachable().values():
        control = copy_of(state)
        calls = []
        for call in ("", "abandon_weight_update", "wake", "update_weights", "resume"):
            if call and call in (moves := calls_of(control)):
                calls.append(call)
                moves[call](control)
            while control.change != "nothing" and (end := wanted.get(control.change, "is done")):
                ends_of(control)[end](control)
        assert control.may_go_on, (state_of(state), calls, state_of(control))


def test_a_change_follows_no_other_than_the_table_says() -> None:
    for change, following in itertools.product(CHANGES, CHANGES):
        control = new_control()
        control.change = change
        if change == "closing" or following == "closing" or following in NEXT[change]:
            control.move(following)
            assert control.change == ("closing" if change == "closing" else following)
        else:
            with pytest.raises(AssertionError):
                control.move(following)


def test_the_page_has_the_tables() -> None:
    page = Path("docs/weights.md").read_text()
    for table in tables():
        assert table in page, "python -m tests.support.control_table prints what belongs there"
