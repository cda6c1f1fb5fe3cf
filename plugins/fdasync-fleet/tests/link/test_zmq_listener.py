"""A wire whose callers do not use up the file descriptors: libzmq would abort the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.link import zmq_listener
from fdasync_fleet.link.zmq_listener import descriptors, reserve_of
from fdasync_fleet.link.zmq_wire import ZmqWire
from wire_files import is_there

from fdasync.testing import until
from tests.support.commands import wait_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.both_loops

_LISTENS = """
import asyncio, sys
from fdasync_fleet.link.zmq_wire import ZmqWire


async def main():
    wire = ZmqWire(on_guard=lambda address, problem: print("shut" if problem else "open", flush=True))
    wire.open(b"x" * 16, lambda pipe, frames: wire.send(pipe, frames), lambda pipe: None)
    wire.listen(sys.argv[1])
    print("listens", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await wire.aclose()
    print("closed", flush=True)


asyncio.run(main())
"""


class End:
    """A wire, what came, and what its listeners said."""

    def __init__(self, number: int) -> None:
        self.got: list[bytes] = []
        self.rooms = 0
        self.said: list[tuple[str, str]] = []
        self.wire = ZmqWire(on_guard=lambda *words: self.said.append(words))
        self.wire.open(bytes([number]) * 16, lambda _, frames: self.got.append(bytes(frames[0])), self._room)

    def _room(self, pipe: object) -> None:
        self.rooms += 1


def test_descriptors_are_counted() -> None:
    before, limit = descriptors()
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(open("/dev/null", "rb"))
        assert descriptors()[0] == before + 10
    assert [reserve_of(limit) for limit in (256, 1024, 1 << 20)] == [64, 256, 1024]


@pytest.mark.parametrize("family", ["ipc", "tcp"])
async def test_few_descriptors_shut_the_listeners_for_a_moment(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 100
    monkeypatch.setattr(zmq_listener, "descriptors", lambda: (count, 1000))
    monkeypatch.setattr(zmq_listener, "_CLOSED_S", 0.3)
    ends = [End(1), End(2)]
    here, one = ends
    try:
        address = here.wire.listen(f"ipc://{tmp_path}/a" if family == "ipc" else "tcp://127.0.0.1:*")
        known = one.wire.dial(address)
        await until(lambda: one.rooms == 1)
        count = 751
        await until(lambda: here.said == [(address, "751 of 1000 file descriptors were open")])
        assert here.wire.guard is not None
        assert (here.wire.guard.shut, here.wire.guard.times_shut) == ([address], 1)
        assert not is_there(tmp_path / "a")
        # who was there comes again by itself
        await until(lambda: here.said[1:] == [(address, "")])
        assert here.wire.guard.shut == []
        await until(lambda: one.wire.send(known, [b"back"]) and b"back" in here.got)
        # what is open is not the callers': to do it again would not help
        await asyncio.sleep(0.5)
        assert here.wire.guard.times_shut == 1
        count = 600
        await asyncio.sleep(0.3)
        count = 800
        await until(lambda: len(here.said) == 4)
        assert here.wire.guard.times_shut == 2
        if family == "ipc":
            assert os.lstat(tmp_path / "a").st_mode & 0o777 == 0o600
    finally:
        for end in ends:
            await end.wire.aclose()
    assert not is_there(tmp_path / "a")


async def test_peers_that_use_many_are_shut_out_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back at once: closing frees for a moment what they then take again."""
    here = End(1)
    shut: list[int] = []

    def counted() -> tuple[int, int]:
        guard = here.wire.guard
        return (600 if guard is not None and guard.shut else 800), 1000

    monkeypatch.setattr(zmq_listener, "descriptors", counted)
    monkeypatch.setattr(zmq_listener, "_LOOK_S", 0.005)
    monkeypatch.setattr(zmq_listener, "_CLOSED_S", 0.01)
    monkeypatch.setattr(zmq_listener, "_REST_S", 0.1)
    loop = asyncio.get_running_loop()
    try:
        here.wire.listen(f"ipc://{tmp_path}/a")
        assert here.wire.guard is not None
        begin = loop.time()
        while loop.time() < begin + 1.5:
            shut.append(here.wire.guard.times_shut)
            await asyncio.sleep(0.01)
    finally:
        await here.wire.aclose()
    # after 0, 0.1, 0.3, 0.7 and 1.5 s, instead of a hundred times
    assert 3 <= max(shut) <= 6


async def test_nothing_left_is_no_reason_to_look_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(zmq_listener.os, "lstat", lambda _: type("Stat", (), {"st_size": 0}))
    monkeypatch.setattr(zmq_listener.os, "listdir", refuses)
    count, limit = descriptors()
    assert count == limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def test_an_address_that_somebody_took_meanwhile_is_left_to_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 900
    monkeypatch.setattr(zmq_listener, "descriptors", lambda: (count, 1000))
    monkeypatch.setattr(zmq_listener, "_CLOSED_S", 0.1)
    here = End(1)
    try:
        address = here.wire.listen(f"ipc://{tmp_path}/a")
        await until(lambda: len(here.said) == 1)
        with socket.socket(socket.AF_UNIX) as thief:
            thief.bind(str(tmp_path / "a"))
            thief.listen()
            count = 100
            await asyncio.sleep(0.5)
            assert here.wire.guard is not None
            assert here.wire.guard.shut == [address]
        await until(lambda: len(here.said) == 2)
        assert here.wire.guard.shut == []
    finally:
        await here.wire.aclose()


@pytest.mark.ci
def test_a_process_that_is_called_by_too_many_lives(tmp_path: Path) -> None:
    path, out = tmp_path / "a", tmp_path / "out"
    script = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\n{_LISTENS}"
    with (
        contextlib.ExitStack() as stack,
        out.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", script, f"ipc://{path}"], stdin=subprocess.PIPE, stdout=file, stderr=file
        ) as process,
    ):
        wait_for(lambda: "listens" in out.read_text() or process.poll() is not None, "listening")
        for _ in range(500):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect(str(path))
            time.sleep(0.005)
        assert process.poll() is None, out.read_text()
        wait_for(lambda: out.read_text().startswith("listens\nshut\nopen\n"), "listening again")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(300.0) == 0
