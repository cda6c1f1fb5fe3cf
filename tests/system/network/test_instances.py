"""Instances and a router on hosts of their own, over delay, loss and cuts: exact, or an error that allows a retry."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import config_file
from tests.system.network.hosts import Host, Wire, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

A, B = "10.9.0.1", "10.9.0.2"
_COMMAND = str(Path(sys.executable).with_name("fdasync"))


class Load:
    """The router and its callers, beside the decode instance."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def end(self) -> dict[str, Any]:
        """What became of the requests, once all of them have ended and one more was served."""
        told, _ = self._process.communicate(timeout=90)
        assert self._process.returncode == 0
        found: dict[str, Any] = json.loads(told)
        return found


@contextmanager
def fleet(folder: Path, weights: str = "", **conditions: Any) -> Iterator[tuple[Wire, Load]]:
    """A prefill instance on the one host, a decode instance and the router on the other, and a wire of these
    conditions."""
    keys, config = str(folder / "keys.json"), config_file(folder)
    subprocess.run([_COMMAND, "keys", "new", keys], check=True, capture_output=True)
    with Host() as a, Host() as b, Wire(a, b, A, B, **conditions) as wire, ExitStack() as ended:

        def start(host: Host, *argv: str) -> subprocess.Popen[str]:
            command = host.command([*argv])
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ended.enter_context(process)
            ended.callback(process.kill)
            return process

        addresses = [f"tcp://{A}:7000", f"tcp://{B}:7001"]
        for host, role, address in ((a, "prefill", addresses[0]), (b, "decode", addresses[1])):
            serve = ["serve", "--config", str(config), "--role", role, "--listen", address, "--keys", keys]
            out = start(host, _COMMAND, *serve).stdout
            assert out is not None
            assert "ready at" in out.readline()
        load = start(b, sys.executable, "-m", "tests.system.network._load", str(config), keys, weights, *addresses)
        assert load.stdout is not None
        assert load.stdout.readline() == "going\n"
        yield wire, Load(load)


def check(found: dict[str, Any]) -> None:
    """Every request ended, right or with an error that allows another try; instances hold nothing of it."""
    assert sum(found["ends"].values()) == found["asked"], found
    assert found["held"] == []
    assert not [end for end in found["ends"] if end.startswith("wrong")], found
    assert found["live"] == 0
    assert found["received_blocks"] > 0, "no hand-over crossed the wire"


@pytest.mark.parametrize(
    ("delay_s", "loss"),
    [
        (0.002, 0.01),
        pytest.param(0.0, 0.0, marks=pytest.mark.slow),
        pytest.param(0.0002, 0.01, marks=pytest.mark.slow),
        pytest.param(0.02, 0.01, marks=pytest.mark.slow),
    ],
)
def test_requests_and_updates_are_exact_over_delay_and_loss(tmp_path: Path, delay_s: float, loss: float) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "weights.json").write_text(json.dumps({"weights_id": 7}))
    with fleet(tmp_path, str(weights), delay_s=delay_s, loss=loss, seed=1) as (_, load):
        time.sleep(1.0)  # the load goes on meanwhile
        found = load.end()
    check(found)
    assert set(found["ends"]) == {"length"}, found
    assert found["weights"] == ["new"]


@pytest.mark.parametrize(
    ("directions", "cut_s"),
    [
        (("ab", "ba"), 1.0),
        *[
            pytest.param(directions, cut_s, marks=pytest.mark.slow)
            for directions in (("ab",), ("ba",), ("ab", "ba"))
            for cut_s in (1.0, 5.0, 40.0)
            if (directions, cut_s) != (("ab", "ba"), 1.0)
        ],
    ],
)
def test_a_cut_hangs_nothing_and_heals(tmp_path: Path, directions: tuple[str, ...], cut_s: float) -> None:
    with fleet(tmp_path, delay_s=0.002, seed=2) as (wire, load):
        wire.cut(*directions)
        time.sleep(cut_s)  # so long is the cut
        wire.cut()
        found = load.end()
    check(found)
    assert found["ends"]["length"] > 1
    assert found["healed_s"] < 20.0
