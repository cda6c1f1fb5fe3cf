"""Clocks of hosts that differ by minutes, and that jump: requests, hand-overs, updates and deadlines do not notice.

Wall clocks are faked (libfaketime) for the processes of one host; clocks that count from a machine's start differ by
time namespaces, as they do between any two machines.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.system.network.fleets import A, B, check, fleet
from tests.system.network.hosts import Host, join, why_not

# the loader reads $LIB itself
_PRELOAD = "/usr/$LIB/faketime/libfaketime.so.1"
_UPTIME = ["unshare", "--time", "--monotonic", "100000", "--boottime", "100000", "--kill-child"]
# libfaketime leaves files there when its process is killed
_OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
_ASK = "import sys, time; print(time.time(), time.monotonic())"


def clock(file: Path) -> list[str]:
    """Runs a command under a wall clock that differs from this machine's as `file` says, at any moment."""
    return [*_OWN_SHM, "env", f"LD_PRELOAD={_PRELOAD}", f"FAKETIME_TIMESTAMP_FILE={file}",
            "FAKETIME_CACHE_DURATION=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"]  # fmt: skip


def why_no_clocks() -> str | None:
    if not any(Path("/usr").glob("lib*/**/faketime/libfaketime.so.1")):
        return "clocks that differ need libfaketime (the package faketime)"
    done = subprocess.run([*_UPTIME, "true"], capture_output=True, text=True, timeout=10)
    return f"no time namespaces here: {done.stderr.strip()}" if done.returncode else None


_REASON = why_not() or why_no_clocks()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


def test_clocks_differ_as_these_tests_believe(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("+7m\n")
    argv = [*_UPTIME, *clock(file), "python3", "-c", _ASK]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    wall, uptime = map(float, done.stdout.split())
    assert wall - time.time() == pytest.approx(420, abs=10)
    assert uptime - time.monotonic() == pytest.approx(100_000, abs=10)


@pytest.mark.parametrize(
    ("prefill", "decode", "router", "jump"),
    [
        ("+7m", "-5m", "+0m", ""),
        ("+0m", "+0m", "-11m", ""),
        # a clock that is set: by an hour back on the host of the prefill instance, forward on that of the router
        ("+3m", "-2m", "+0m", "prefill -60m"),
        ("+3m", "-2m", "+0m", "router +60m"),
    ],
)
def test_hosts_of_other_times_serve_together(tmp_path: Path, prefill: str, decode: str, router: str, jump: str) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "weights.json").write_text(json.dumps({"weights_id": 7}))
    files = {part: tmp_path / f"clock-{part}" for part in ("prefill", "decode", "router")}
    for part, differs in zip(files, (prefill, decode, router), strict=True):
        files[part].write_text(f"{differs}\n")
    under = {part: clock(file) for part, file in files.items()}
    under["prefill"] = [*_UPTIME, *under["prefill"]]
    a, b = Host(), Host()
    wire = join("near", a, b, A, B, seed=3)
    with fleet(
        tmp_path,
        a,
        b,
        wire,
        weights=str(weights),
        under=under,
        runner={"step_s": 0.005},
        late=True,
        transport=("tcp", "--encrypt-blocks"),
    ) as load:
        if jump:
            part, by = jump.split()
            files[part].write_text(f"{by}\n")
        time.sleep(1.5)  # the load goes on meanwhile; libfaketime looks once a second
        load.update()
        found = load.end()
    check(found)
    assert set(found["ends"]) <= {"length", "abort"}, found
    assert found["ends"]["length"] > 2
    assert found["weights"] == ["new"]
    # a request whose deadline passes while it runs on another machine
    assert found["late"]["end"] == "deadline"
    assert 0.4 <= found["late"]["took_s"] < 2.0
