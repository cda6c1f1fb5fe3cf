"""What the table of `fdasync up` says of an instance."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from fdasync_fleet.cli.local.restarts import RestartRules, Restarts
from fdasync_fleet.cli.up_table import Rates, fleet_table
from fdasync_fleet.router.stats import InstanceStats, RouterStats
from rich.console import Console

from tests.support.router_scene import status_of


class FakeChild:
    name, role, state, address = "m0", "mixed", "ready", "ipc:///run/m0"


def shown(**values: Any) -> str:
    """The row of one instance, as a terminal gets it."""
    return next(line for line in drawn(**values).splitlines() if re.match(r" *m0 +mixed", line))


def drawn(width: int = 160, **values: Any) -> str:
    """The table with one instance."""
    fields: dict[str, Any] = {
        "name": "m0", "address": "ipc:///run/m0", "says": "ipc:///run/m0", "role": "mixed", "is_up": True,
        "problem": "", "state": "running", "status": status_of(free=50), "status_at": 0.0,
        "age_s": 0.1, "doing": "running", "stats": None, "live": 0, "known_blocks": 0, "weight_version": "0", **values,
    }  # fmt: skip
    stats = RouterStats(instances=(InstanceStats(**fields),), live=0, dropped=())
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    child: Any = FakeChild()
    console.print(fleet_table([child], stats, Rates(), {"m0": Restarts(RestartRules())}, 0.0))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(("values", "state", "color"), [
    ({}, "running", 32),
    # it is there, and gets no requests
    ({"problem": "it has other weights than the others"}, "behind", 35),
    ({"problem": "it has other weights than the others", "state": "paused"}, "paused", 33),
    ({"problem": "silent for 3 s", "state": "away", "is_up": False}, "away", 31),
])  # fmt: skip
def test_a_state_and_its_color(values: dict[str, Any], state: str, color: int) -> None:
    assert f"\x1b[{color}m{state}\x1b[0m" in shown(**values)


@pytest.mark.parametrize("state", ["running", "waits_for_weights"])
def test_at_80_columns_no_word_is_broken(state: str) -> None:
    text = re.sub(r"\x1b\[[\d;]*m", "", drawn(80, state=state, status=status_of(free=1234567)))
    words = set(text.split())
    assert max(map(len, text.splitlines())) <= 80
    headers = {"name", "role", "state", "run", "wait", "free", "blocks", "tok/s", "prompt/s", "received"}
    assert words >= {*headers, "restarts", "1234567", "mixed", *state.split("_")}
