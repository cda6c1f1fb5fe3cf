"""The commands, on this tree: a change that matters is killed, in children too, one that does not survives."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tests.mutants.mutant import Mutant, around, scope_at
from tests.mutants.run import Ring
from tests.support.imports import HOME

pytest.importorskip("coverage")

ROOT = HOME.parent
FLEET = "plugins/fdasync-fleet/src/fdasync_fleet"
TESTS = ["tests/cache/test_aux.py", "tests/cache/store/process/test_proxy.py"]


def mutant(number, path, before, after):
    source = (ROOT / path).read_text()
    assert source.count(before) == 1
    line = source[: source.index(before)].count("\n") + 1
    above, below = around(source, line, 1)
    return Mutant(
        number=number, area="cache", operator="hand", path=path, line=line, scope=scope_at(source, line), above=above,
        below=below, before=before, after=after,
    )  # fmt: skip


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly  # it collects the whole suite once, and runs two files of it several times
def test_what_matters_is_killed_and_the_rest_survives(tmp_path):
    mutants = [
        mutant(1, "fdasync/cache/aux.py", "        return len(self._free)", "        return len(self._free) + 1"),
        mutant(2, "fdasync/cache/aux.py", "        return len(self._free)", "        return 0 + len(self._free)"),
        # in the store's process
        mutant(
            3, "fdasync/cache/store/process/main.py", "        if not self._is_open:", "        if self._is_open:",
        ),
        mutant(4, "fdasync/cache/aux.py", "        return len(self._free)", "        while True: pass"),
        mutant(
            5, f"{FLEET}/router/validation.py",
            "    return isinstance(value, int) and not isinstance(value, bool)",
            "    return True",
        ),
    ]  # fmt: skip
    (tmp_path / "drawn").write_bytes(msgspec.json.encode(mutants[:3]))
    command("map", "--out", tmp_path / "map", "-q", *TESTS)
    arguments = [
        tmp_path / "drawn",
        "--map",
        tmp_path / "map",
        "--marks",
        "not ci and not nightly",
        "--out",
        tmp_path / "out",
    ]
    assert "3 mutants, 0 of them done" in command("run", *arguments)
    # it goes on with those that it has no result of
    (tmp_path / "drawn").write_bytes(msgspec.json.encode(mutants))
    assert "5 mutants, 3 of them done" in command("run", *arguments, "--limit-s", "5")
    results = msgspec.json.decode((tmp_path / "out").read_bytes(), type=Ring).results
    assert [(one.state, one.how) for one in results] == [
        ("killed", "failed"), ("survived", ""), ("killed", "failed"), ("killed", "hung"), ("uncovered", ""),
    ]  # fmt: skip
    assert [one.test.partition("::")[0] for one in results] == [TESTS[0], "", TESTS[1], TESTS[0], ""]
    assert "| cache | 5 | 3 |" in command("table", tmp_path / "out")
