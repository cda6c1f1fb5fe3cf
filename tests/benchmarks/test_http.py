"""The benchmarks of the HTTP front: what their clients count, and short runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from benchmarks.http.arms import Counted, Load, Tally, tokens_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

LOAD = Load(streams=3, warm_s=1.0, count_s=2.0)


def test_prompts_are_the_same_for_every_arm_and_differ_between_streams():
    again = msgspec.json.decode(msgspec.json.encode(LOAD), type=Load)
    assert LOAD.prompt(1) == again.prompt(1) != LOAD.prompt(2)
    assert len(LOAD.prompt(1)) == 32


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (b'a3\r\ndata: {"choices":[{"index":0,"token_ids":[17],"finish_reason":null}]}\n\n', 1),
        (b'data: {"choices":[{"index":0,"token_ids":[17,4,150000],"finish_reason":null}]}\n\n', 3),
        (b'data: {"choices":[{"index":0,"token_ids":[],"finish_reason":"length"}]}\n\n', 0),
        (b"data: [DONE]\n\n", 0),
    ],
)
def test_tokens_of_an_event_are_counted_without_parsing_it(event: bytes, count: int):
    assert tokens_of(event) == count


def test_a_tally_counts_what_comes_in_its_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    now = 100.0
    monkeypatch.setattr("benchmarks.http.arms.time.monotonic", lambda: now)
    tally = Tally(LOAD)
    last = tally.event(7, 0.0)
    for now in (101.25, 101.5, 102.5):  # noqa: B007 - the clock reads it
        last = tally.event(2, last)
    assert not tally.is_over
    now = 103.0
    assert tally.is_over
    tally.event(5, last)
    assert capsys.readouterr().out == "counting\n"
    # the first gap began before the count
    assert tally.counted() == Counted(tokens=6, events=3, gap_p99_s=1.0)


@pytest.mark.nightly
def test_a_short_run_has_every_figure(tmp_path: Path):
    out = tmp_path / "http.json"
    command = [sys.executable, "-m", "benchmarks", "http", "--runs", "1", "--streams", "3", "--seconds", "3"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=600)
    figures = json.loads(out.read_text())["figures"]
    assert {f"{name}_3" for name in ("http_over_direct", "gap_p99_ms")} < figures.keys()
    # steps of 20 ms, but a busy machine is late
    assert 0 < figures["direct_tokens_s_3"] <= 3 * 52
    assert 0.1 < figures["http_over_direct_3"] < 10
    assert figures["gap_p99_ms_direct"] > 0
    assert figures["front_us_per_chunk"] > 0
