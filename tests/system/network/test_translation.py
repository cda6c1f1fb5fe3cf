"""A prefill instance behind address translation: it hands over where it says how it is reached, and else errors and
stats name both views."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from shutil import which
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import config_file
from tests.system.network.fleets import COMMAND
from tests.system.network.hosts import Host, Wire, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# the hidden host, the gateway's two addresses, and the host outside
HIDDEN, INNER, OUTER, B = "192.168.7.2", "192.168.7.1", "10.9.0.1", "10.9.0.2"
PORT, DATA_PORT = 7000, 7100
_GATEWAY = (
    "sysctl -qw net.ipv4.ip_forward=1",
    f"iptables -t nat -A PREROUTING -i out -p tcp --dport {PORT} -j DNAT --to-destination {HIDDEN}:{PORT}",
    f"iptables -t nat -A PREROUTING -i out -p tcp --dport {DATA_PORT} -j DNAT --to-destination {HIDDEN}:{DATA_PORT}",
    "iptables -t nat -A POSTROUTING -o out -j MASQUERADE",
)
# asks once, and tells how it ended and what the router saw
_ASK = """
import asyncio, json, sys, fdasync
from fdasync import SamplingParams
from fdasync.errors import FdasyncError
from fdasync_fleet.router.config import RouterConfig

async def main(keys, *addresses):
    async with fdasync.connect(addresses, RouterConfig(require="all", retries=0), keys=keys) as router:
        try:
            result = await router.complete([7] * 40, SamplingParams(max_tokens=4), deadline_s=20.0)
            told = result.samples[0].finish_reason
        except FdasyncError as error:
            told = f"{type(error).__name__}: {error}"
        await asyncio.sleep(1.0)
        one, other = router.stats().instances
        print(json.dumps({"told": told, "says": one.says, "received": other.status.stats.scheduler.received_blocks}))

asyncio.run(main(*sys.argv[1:]))
"""


def why_no_translation() -> str | None:
    if which("iptables") is None or which("sysctl") is None:
        return "address translation needs the commands iptables and sysctl"
    argv = ["unshare", "--net", "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    return f"no address translation here: {done.stderr.strip()}" if done.returncode else None


_REASON = why_not() or why_no_translation()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


def served(folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """How a request ends: its prefill instance, started with these options, stands behind the gateway."""
    rules = {"silent_s": 1.0, "find_s": 2.0, "receive_s": 1.0, "total_s": 6.0}
    keys, config = str(folder / "keys.json"), config_file(folder, leases=rules)
    subprocess.run([COMMAND, "keys", "new", keys], check=True, capture_output=True)
    with (
        Host() as a,
        Host() as gateway,
        Host() as b,
        Wire(a, gateway, HIDDEN, INNER, device="in"),
        Wire(b, gateway, B, OUTER, device="out"),
        ExitStack() as ended,
    ):
        for line in _GATEWAY:
            subprocess.run(gateway.command(line.split()), check=True)
        route = ["ip", "route", "add", "default", "via", INNER, "dev", "wire"]
        subprocess.run(a.command(route), check=True)
        serve = [COMMAND, "serve", "--config", str(config), "--keys", keys, "--transport", "tcp", "--role"]
        for host, own in (
            (a, ["prefill", "--listen", f"tcp://{HIDDEN}:{PORT}", *options]),
            (b, ["decode", "--listen", f"tcp://{B}:7001"]),
        ):
            process = subprocess.Popen(host.command([*serve, *own]), stdout=subprocess.PIPE, text=True)
            ended.enter_context(process)
            ended.callback(process.kill)
            assert process.stdout is not None
            assert "ready at" in process.stdout.readline()
        ask = [sys.executable, "-c", _ASK, keys, f"tcp://{OUTER}:{PORT}", f"tcp://{B}:7001"]
        done = subprocess.run(b.command(ask), stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_behind_a_gateway_blocks_are_read_where_the_instance_says(tmp_path: Path) -> None:
    found = served(tmp_path, ["--host", OUTER, "--data-port", str(DATA_PORT)])
    assert found["told"] == "length"
    assert found["says"] == f"tcp://{OUTER}:{PORT}"
    assert found["received"] > 0


def test_an_instance_that_says_its_inner_address_is_named_with_both_views(tmp_path: Path) -> None:
    found = served(tmp_path, [])
    # the router reaches it at the gateway
    assert found["says"] == f"tcp://{HIDDEN}:{PORT}"
    assert found["received"] == 0
    assert f"the sender says that its blocks are at {HIDDEN}:" in found["told"], found
    assert f"and from {B} they cannot be reached there" in found["told"], found
