"""Hosts and wires do what the tests over them rely on: delay, loss by seed, cuts in one direction, none left behind."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.network.hosts import Cable, Host, Wire, why_no_cable, why_not

_REASON, _NO_CABLE = why_not(), why_no_cable()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

A, B, PORT = "10.9.0.1", "10.9.0.2", 9000

# numbers the datagrams that it gets, and sends each back
_ECHO = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("{B}", {PORT}))
print("ready", flush=True)
seen = 0
while True:
    data, peer = s.recvfrom(100)
    seen += 1
    s.sendto(b"%s %d" % (data, seen), peer)
"""
# sends one datagram per argument, prints what came back to each and after how long
_ASK = f"""
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.3)
for word in sys.argv[1:]:
    start = time.monotonic()
    s.sendto(word.encode(), ("{B}", {PORT}))
    try:
        print(s.recv(100).decode(), time.monotonic() - start)
    except TimeoutError:
        print(word, "lost")
"""
# takes one connection's bytes, prints how many and in what time
_SINK = f"""
import socket, time
s = socket.create_server(("{B}", {PORT}))
print("ready", flush=True)
peer, _ = s.accept()
start, count = time.monotonic(), 0
while data := peer.recv(1 << 16):
    count += len(data)
print(count, time.monotonic() - start)
"""
_POUR = f"""
import socket
s = socket.create_connection(("{B}", {PORT}))
s.sendall(bytes(3_000_000))
s.close()
"""


@contextmanager
def echo(host: Host) -> Iterator[None]:
    server = subprocess.Popen(host.command([sys.executable, "-c", _ECHO]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        try:
            assert server.stdout.readline() == "ready\n"
            yield
        finally:
            server.kill()


def ask(host: Host, *words: str) -> list[list[str]]:
    argv = host.command([sys.executable, "-c", _ASK, *words])
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.ci
def test_a_packet_takes_the_delay_each_way() -> None:
    with Host() as a, Host() as b, Wire(a, b, A, B, delay_s=0.02), echo(b):
        [[word, seen, took_s]] = ask(a, "x")
    assert (word, seen) == ("x", "1")
    assert float(took_s) >= 0.04


@pytest.mark.ci
def test_a_rate_takes_its_time_for_each_byte() -> None:
    with Host() as a, Host() as b, Wire(a, b, A, B, rate_mbit=0.1), echo(b):
        [[_, _, took_s]] = ask(a, "x" * 90)
    # 118 bytes there and 120 back
    assert float(took_s) >= 0.019


@pytest.mark.skipif(_NO_CABLE is not None, reason=str(_NO_CABLE))
def test_a_cable_has_its_rate() -> None:
    with Host() as a, Host() as b, Cable(a, b, A, B, rate_mbit=80):
        sink = subprocess.Popen(b.command([sys.executable, "-c", _SINK]), stdout=subprocess.PIPE, text=True)
        with sink:
            assert sink.stdout is not None
            assert sink.stdout.readline() == "ready\n"
            subprocess.run(a.command([sys.executable, "-c", _POUR]), check=True, timeout=600)
            count, took_s = sink.stdout.readline().split()
    assert int(count) == 3_000_000
    # 24 Mbit, of which 2 go at once
    assert float(took_s) >= 0.25


@pytest.mark.ci
def test_a_cut_in_one_direction_lets_the_other_through_and_heals() -> None:
    with Host() as a, Host() as b, Wire(a, b, A, B) as wire, echo(b):
        wire.cut("ba")
        assert ask(a, "answer-cut") == [["answer-cut", "lost"]]
        wire.cut("ab")
        assert ask(a, "question-cut") == [["question-cut", "lost"]]
        wire.cut()
        [[word, seen, _]] = ask(a, "healed")
    # the first was heard and its answer lost; the second was not heard
    assert (word, seen) == ("healed", "2")


@pytest.mark.ci
def test_a_seed_loses_the_same_packets_again() -> None:
    words = [f"w{i}" for i in range(12)]

    def lost() -> list[str]:
        with Host() as a, Host() as b, Wire(a, b, A, B, loss=0.2, seed=5), echo(b):
            return [line[0] for line in ask(a, *words) if line[1] == "lost"]

    first = lost()
    assert 0 < len(first) < len(words)
    assert lost() == first


def test_a_killed_process_leaves_no_host_behind() -> None:
    holder = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from hosts import Host\n"
        "with Host() as host: print(host.pid, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", holder, str(Path(__file__).parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        gone = os.pidfd_open(pid)
        try:
            assert not select.select([gone], [], [], 0)[0]
            process.kill()
            assert select.select([gone], [], [], 300)[0], f"process {pid} still holds its namespace"
        finally:
            os.close(gone)
