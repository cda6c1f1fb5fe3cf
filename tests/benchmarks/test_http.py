"""The benchmarks of the HTTP front: what their clients count, and short runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import pytest

from benchmarks.http.client import tokens_of
from benchmarks.http.load import Counted, Load, Tally

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

LOAD = Load(
    streams=3, prompt_tokens=20, vocab_size=500, least_tokens=5, most_tokens=9, rows=True, warm_s=0.5, count_s=3.0
)


def test_prompts_and_lengths_are_the_same_for_every_arm_and_differ_between_streams():
    again = msgspec.json.decode(msgspec.json.encode(LOAD), type=Load)
    assert LOAD.prompt(1) == again.prompt(1) != LOAD.prompt(2)
    assert len(LOAD.prompt(1)) == 20
    lengths = list(islice(LOAD.lengths(1), 50))
    assert lengths == list(islice(again.lengths(1), 50)) != list(islice(LOAD.lengths(2), 50))
    assert set(lengths) == {5, 6, 7, 8, 9}


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
    monkeypatch.setattr("benchmarks.http.load.time.monotonic", lambda: now)
    tally = Tally(msgspec.structs.replace(LOAD, warm_s=1.0, count_s=2.0))
    last = tally.event(7, 0.0)
    for now in (101.25, 101.5, 102.5):  # noqa: B007 - the clock reads it
        last = tally.event(2, last)
    tally.reply()
    assert not tally.is_over
    now = 103.0
    assert tally.is_over
    tally.event(5, last)
    tally.reply()
    tally.print()
    told, counted = capsys.readouterr().out.splitlines()
    assert told == "counting"
    # the first gap began before the count
    assert msgspec.json.decode(counted, type=Counted) == Counted(
        tokens=6, events=3, replies=1, gap_p50_s=1.0, gap_p99_s=1.0
    )


@pytest.mark.nightly
def test_a_short_run_has_every_figure(tmp_path: Path):
    out = tmp_path / "http.json"
    command = [sys.executable, "-m", "benchmarks", "http", "--runs", "1", "--streams", "3", "--seconds", "3"]
    subprocess.run([*command, "--probes", "4", "--json", str(out)], check=True, timeout=600)
    figures = json.loads(out.read_text())["figures"]
    assert {f"{name}_3" for name in ("http_over_direct", "tokens_per_event", "gap_p99_ms")} < figures.keys()
    # steps of 20 ms, but a busy machine is late
    assert 0 < figures["direct_tokens_s_3"] <= 3 * 52
    assert 0.1 < figures["http_over_direct_3"] < 10
    assert figures["tokens_per_event_3"] >= 1
    assert figures["ttft_ms_p50_direct"] >= 20
    for name in ("front_us_per_chunk", "engine_step_moved", "rollout_mb_s", "base64_mb_s"):
        assert figures[name] > 0
    assert "ttft_added_ms_p50" in figures
