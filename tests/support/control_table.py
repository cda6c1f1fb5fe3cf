"""What control calls do in each state of an engine, as the tables of docs/weights.md. Prints them when run.

python -m tests.support.control_table
"""

from __future__ import annotations

from fdasync.engine.weights.control import CALLS, CHANGES, NEXT, Change, Control
from fdasync.engine.weights.state import WeightsState
from fdasync.errors import Asleep, BadInput, FdasyncError, UpdateUnderWay, WeightsBroken

_NAMES = {
    BadInput: "`BadInput`",
    UpdateUnderWay: "`UpdateUnderWay`",
    Asleep: "`Asleep`",
    WeightsBroken: "`WeightsBroken`",
}


def new_control() -> Control:
    return Control(WeightsState("0", ""))


def word_of(control: Control, call: str) -> str:
    """What becomes of a call: an error, "waits", "at once", or the change that it begins."""
    try:
        control.check(call)
    except FdasyncError as error:
        return _NAMES[type(error)]
    if control.waits(call):
        return "waits"
    return CALLS[call].begins.replace("_", " ").replace("nothing", "at once")


def _in_change(change: Change) -> Control:
    control = new_control()
    control.change = change
    return control


def _grid(states: dict[str, Control]) -> list[str]:
    """A line a call; states in which all calls do the same share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, control in states.items():
        columns.setdefault(tuple([word_of(control, call) for call in CALLS]), []).append(name.replace("_", " "))
    lines = [
        "| call | " + " | ".join(", ".join(names) for names in columns.values()) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for number, call in enumerate(CALLS):
        lines.append(f"| `{call}` | " + " | ".join(column[number] for column in columns) + " |")
    return lines


def _weights() -> dict[str, Control]:
    broken, dropped, away = new_control(), new_control(), new_control()
    broken.breaks(WeightsBroken("they are"))
    dropped.weights = "dropped"
    away.sleeps, away.released = True, ("weights",)
    return {"broken": broken, "dropped": dropped, "their memory released": away}


def tables() -> list[str]:
    calls = _grid({change: _in_change(change) for change in CHANGES if change != "closing"})
    weights = _grid(_weights())
    following = ["| change | what may follow |", "| --- | --- |"]
    following += [
        f"| {change.replace('_', ' ')} | {', '.join(NEXT[change]).replace('_', ' ')} |"
        for change in CHANGES
        if NEXT[change]
    ]
    return ["\n".join(lines) for lines in (calls, weights, following)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
