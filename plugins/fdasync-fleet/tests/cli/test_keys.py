"""`fdasync keys`: what a person sees, and what a file holds."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
from fdasync_fleet.link.keys import load_keys

from fdasync.cli.main import main


def keys(*arguments, code=0):
    """Run a command, in this process; what it printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr("sys.argv", ["fdasync", "keys", *map(str, arguments)])
        ended = 0
        try:
            main()
        except SystemExit as error:
            ended = error.code or 0
    assert ended == code, out.getvalue()
    return out.getvalue()


def test_a_fleets_keys_are_made_replaced_and_shown(tmp_path):
    file = tmp_path / "fleet.json"
    assert "copy it to all machines" in keys("new", file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "is there already" in keys("new", file, code=2)
    first = load_keys(file).keys[0]
    assert "has one key" in keys("rotate", file, code=2)
    assert "has one key" in keys("drop", file, code=2)
    keys("add", file)
    second = load_keys(file).keys[1]
    assert "two keys already" in keys("add", file, code=2)
    keys("rotate", file)
    assert load_keys(file).keys == (second, first)
    shown = keys("show", file) + keys("show", file, "--json")
    for key in (first, second):
        for pair in (key.server, key.client):
            assert pair.public in shown
            assert pair.secret not in shown
            assert pair.secret not in repr(load_keys(file))
    keys("drop", file)
    assert load_keys(file).keys == (second,)
    assert json.loads(keys("show", file, "--json"))["keys"] == [
        {"server": second.server.public, "client": second.client.public}
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["fleet.json"]
