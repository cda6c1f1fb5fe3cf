"""The screen of `fdasync top`, in terminals of any size."""

from __future__ import annotations

import io
from typing import Any

import pytest
from fdasync_fleet.cli.top_screen import Screen
from rich.console import Console

from fdasync.telemetry.sight.summary import Summary, summary_of
from tests.telemetry.sight.scene import counts, moment, picks, sight, watched


def shown(summary: Summary, columns: int, rows: int, problem: str = "", *, whole: bool = False) -> list[str]:
    """The lines, as a terminal of this size gets them."""
    console = Console(file=io.StringIO(), width=columns, height=rows, force_terminal=True, color_system=None)
    console.print(Screen(summary, problem, whole=whole), end="")
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def fleet(count: int, **values: Any) -> Summary:
    """The last engine is away."""
    moments = (moment(1, tokens=500_000, prompt_tokens=2_000_000, hits=(900_000, 100_000, 0), running=9_999,
                      ttft=counts(0.25), tpot=counts(0.0123)),)  # fmt: skip
    own = sight(
        running=9_999, waiting=1_234, used_blocks=100_000, free_blocks=3_456, idle_blocks=20_000, used_slots=300_000,
        moments=moments, **values,
    )  # fmt: skip
    engines = [watched(f"tcp://10.0.0.1:500/decode-{at}", "decode", own) for at in range(count)]
    engines.append(watched("m-away", "mixed", own, is_up=False, problem="silent for 3 s"))
    return summary_of(engines, model="Qwen3-30B-A3B")


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 60), (40, 10), (20, 4), (1, 1)])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_it_fits_every_terminal(columns: int, rows: int, count: int) -> None:
    lines = shown(fleet(count), columns, rows, "the front does not answer")
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_80_x_24_has_everything_that_matters() -> None:
    summary = fleet(3, picks=(picks([[900, 0, 100], [500, 500, 500]], rows=10, counted=5),))
    lines = shown(summary, 80, 24)
    text = "\n".join(lines)
    assert lines[0] == "fdasync top  Qwen3-30B-A3B  weights 0  4 engines: 3 running, 1 away"
    assert "requests running 29,997  waiting 3,702" in text
    assert "tokens/s 300,000  prompt 1,200,000" in text
    assert "first token 0.2" in text
    assert "hits     50% of prompt tokens  device 45%  host 5%  store 0%" in text
    assert "########==" in text
    assert "max/mean 2.7 (layer 3)  never chosen 1: 3/1  seen 50% of tokens" in text
    assert any(line.startswith("decode-0 ") and "running" in line and " 81% " in line for line in lines), text
    assert lines[-1] == "! m-away: silent for 3 s"


def test_nothing_that_an_engine_says_moves_the_cursor() -> None:
    own = sight(moments=(moment(1, tokens=5),))
    name, problem = "\x1b]0;name\x07 m0", "it\x1b[2J\nfell\rsilent\x9b1m"
    summary = summary_of([watched(name, "mixed", own, is_up=False, problem=problem)], model="m\x1b[1mm")
    text = "\n".join(lines := shown(summary, 120, 14, "a\nb"))
    assert len(lines) <= 14
    assert "it?[2J?fell" in text
    assert all(one.isprintable() or one == "\n" for one in text)


def test_engines_with_problems_come_first_where_not_all_have_room() -> None:
    lines = shown(fleet(40), 80, 24)
    assert lines[9].startswith("m-away ")
    assert lines[-2] == "and 28 more"
    assert len(shown(fleet(40), 80, 24, whole=True)) == 8 + 1 + 41 + 1


def test_a_narrow_terminal_has_fewer_columns() -> None:
    heads = [shown(fleet(2), columns, 24)[8].split() for columns in (80, 50, 30)]
    assert heads[0][:3] == ["name", "role", "state"]
    assert heads[1] == ["name", "state", "run", "wait", "blocks", "tok/s", "ms/tok"]
    assert heads[2] == ["name", "state", "run", "tok/s"]


def test_what_is_not_known_is_a_dash() -> None:
    lines = shown(summary_of([watched("", "", None, is_up=False, problem="has not answered yet")], model="m"), 80, 24)
    text = "\n".join(lines)
    assert "latency  first token - - - s  each - - - ms" in text
    assert "hits     -" in text
    assert "experts  -" in text
    assert "! ipc:///run/: has not answered yet" in text


def test_each_state_has_its_word_above_and_in_its_line() -> None:
    states = ("running", "paused", "updating", "asleep", "waking", "waits_for_weights", "broken", "draining")
    engines = [watched(f"m{number}", shown=sight(state=state)) for number, state in enumerate(states)]
    lines = shown(summary_of(engines, model="m"), 150, 30)
    words = [state.replace("_", " ") for state in states]
    assert lines[0].endswith("8 engines: 1 running, 1 paused, 1 waits for weights, 1 broken, 1 updating, 1 asleep, "
                             "1 waking, 1 draining")  # fmt: skip
    told = {line.split()[0]: line for line in lines[8:]}
    assert all(f" {word} " in told[f"m{number}"] for number, word in enumerate(words))
    # what nobody but an update can end is a problem
    assert [line.split(":")[0] for line in lines if line.startswith("! ")] == ["! m5", "! m6"]
    alike = summary_of([watched("a", shown=sight(state="asleep"))], model="m")
    assert shown(alike, 80, 24)[0].endswith("1 engine: 1 asleep")
    assert "running" not in shown(summary_of([watched("a", shown=sight())], model="m"), 80, 24)[0]


def test_80_columns_have_the_longest_word() -> None:
    engines = [watched("m0", shown=sight(state="waits_for_weights", moments=(moment(1, tokens=5),)))]
    lines = shown(summary_of(engines, model="m"), 80, 24)
    assert any(" waits for weights " in line for line in lines)
