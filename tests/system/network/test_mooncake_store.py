"""A Mooncake Store that two hosts share: what an engine on the one has written, an engine on the other reads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.system.network.hosts import Host, Wire, why_not

_REASON = why_not()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]

A, B = "10.9.1.1", "10.9.1.2"
_START_S = 30.0
_LENT_NBYTES = 256 << 20


def stored(host: Host, first: int, count: int) -> dict[str, Any]:
    """Blocks written and fetched by an engine on a host that serves these prompts right."""
    argv = [sys.executable, "-m", "tests.system.network._stored", f"{A}:50051", str(first), str(count)]
    done = subprocess.run(host.command(argv), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_two_hosts_share_a_store() -> None:
    try:
        from fdasync_mooncake import testing
    except ImportError as error:
        pytest.skip(f"plugins/fdasync-mooncake is not installed: {error}")
    if reason := testing.why_not():
        pytest.skip(reason)
    master = [
        testing.master_binary(),
        f"--rpc_address={A}",
        "--rpc_port=50051",
        "--metrics_host=127.0.0.1",
        "--metrics_port=9003",
    ]
    memory = [
        testing.master_binary().with_name("mooncake_client"), f"--host={B}", "--port=50052",
        f"--global_segment_size={_LENT_NBYTES}", f"--master_server_address={A}:50051",
        "--metadata_server=P2PHANDSHAKE",
    ]  # fmt: skip
    with Host() as a, Host() as b, Wire(a, b, A, B, delay_s=0.001), ExitStack() as ended:
        # the master on the one host, the memory on the other
        for host, argv in ((a, master), (b, memory)):
            process = subprocess.Popen(
                host.command([str(word) for word in argv]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            ended.callback(process.wait, 20)
            ended.callback(process.kill)
            if host is a:
                _until_up(a)
        _until_lent(a)
        first = stored(a, 0, 6)
        assert (first["written"], first["fetched"]) == (first["blocks"], 0)
        # the same prompts are read on the other host, and then on this one, over the wire; but for those that an engine
        # that does not know the store's speed yet would sooner compute
        for host in (b, a):
            again = stored(host, 0, 6)
            assert again["fetched"] > 0
            assert again["fetched"] + again["written"] == again["blocks"]


def _until_up(host: Host) -> None:
    _ask_until(host, "/health", '"service_ready":true')


def _until_lent(host: Host) -> None:
    _ask_until(host, "/metrics", f"master_total_capacity_bytes {_LENT_NBYTES}")


def _ask_until(host: Host, path: str, wanted: str) -> None:
    """Ask the master's metrics server until it says this."""
    script = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9003{path}', timeout=2).read().decode())"
    until, told = time.monotonic() + _START_S, ""
    while time.monotonic() < until:
        told = subprocess.run(
            host.command([sys.executable, "-c", script]), capture_output=True, text=True, timeout=20
        ).stdout
        if wanted in told:
            return
        time.sleep(0.1)
    raise AssertionError(f"the master did not say {wanted!r} within {_START_S:g} s: {told[-500:]}")
