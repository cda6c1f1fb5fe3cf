"""The command line as a user meets it: `doctor` and `plugins`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from fdasync.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int | None, *arguments: str) -> Any:
    """What the command prints as JSON in this process when it ends with this code; None: with any."""
    monkeypatch.setattr(sys, "argv", ["fdasync", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert code in (None, ended.value.code), err
    return json.loads(out)


def test_doctor_and_plugins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # other plugins that are installed may be broken
    findings = {finding["what"]: finding for finding in said(capsys, monkeypatch, None, "doctor")}
    assert findings["Python"]["state"] == "ok"
    assert findings["torch"]["found"]
    assert findings["memory between processes"]["state"] == "ok"
    assert findings["plugin synthetic (fdasync.runners)"]["state"] == "ok"
    listed = {(info["group"], info["name"]): info for info in said(capsys, monkeypatch, 0, "plugins", "--no-load")}
    assert listed["fdasync.runners", "synthetic"]["problem"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plugins", "--nothing"], "No such option '--nothing'. (see `fdasync plugins --help`)"),
        (["doctor", "--tp", "0"], "'--tp': 0 is out of range (limit: 1 to 8) (see `fdasync doctor --help`)"),
        (["doctor", "--model"], "Option '--model' requires an argument. (see `fdasync doctor --help`)"),
        (["nothing"], "No such command 'nothing'. (see `fdasync --help`)"),
    ],
)
def test_a_wrong_word_is_told_in_a_line_with_the_way_out(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fdasync", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("fdasync: ")
    assert line.endswith(told)


def test_a_broken_plugin_is_listed_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_plugin(tmp_path, monkeypatch)
    listed = {entry["name"]: entry for entry in said(capsys, monkeypatch, 1, "plugins")}
    assert "no_such_module" in listed["bad"]["problem"]
    assert listed["bad"]["distribution"] == "bad"


def test_at_80_columns_no_name_of_a_plugin_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_plugin(tmp_path, monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["fdasync", "plugins"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    listed = said(capsys, monkeypatch, 1, "plugins")
    words = set(out.split())
    assert words >= {word for entry in listed for word in (entry["name"], entry["distribution"])}
    assert words >= {entry["group"].removeprefix("fdasync.") for entry in listed}
    # its reason is a line of its own, whole
    (problem,) = [entry["problem"] for entry in listed if entry["name"] == "bad"]
    assert f"bad: {problem}" in out.splitlines()


def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution whose one plugin cannot be imported."""
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fdasync.runners]\nbad = no_such_module:Runner\n")
    monkeypatch.syspath_prepend(tmp_path)
