"""A child process over a channel: what it says last is heard before its end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from fdasync.errors import WorkerDied
from fdasync.ipc.child import ChildProcess, is_stopped
from fdasync.testing.harness.leaks import Resources

# each frame carries an fd: one read of the socket brings no more than one of them
_CHILD = """
    import os, socket, sys

    def main():
        sock = socket.socket(fileno=int(sys.argv[1]))
        for number in range(5):
            frame = (1).to_bytes(4, "little") + bytes([1]) + bytes([number])
            socket.send_fds(sock, [frame], [0])
        os._exit(7)
"""


def test_who_is_stopped_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid)


@pytest.fixture
def last_words(tmp_path, monkeypatch) -> str:
    """The name of a module whose `main` is the child."""
    (tmp_path / "fdasync_last_words.py").write_text(textwrap.dedent(_CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "fdasync_last_words"


@pytest.mark.both_loops
async def test_what_a_child_wrote_right_before_its_exit_comes_before_its_death(last_words):
    loop = asyncio.get_running_loop()
    heard: list[bytes] = []
    death: asyncio.Future[tuple[list[bytes], Exception]] = loop.create_future()

    def on_frame(payload: bytes, fds: list[int]) -> None:
        heard.append(payload)
        for fd in fds:
            os.close(fd)

    child = ChildProcess(loop, "child", last_words, on_frame, lambda error: death.set_result((list(heard), error)))
    # blocks the loop on purpose: it finds the frames and the end at once
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
    async with asyncio.timeout(300):
        before, error = await death
    await child.kill()
    assert before == heard == [bytes([number]) for number in range(5)]
    assert isinstance(error, WorkerDied)
    assert error.exit_status == 7


def _out_of_fds(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def _nobody_hears(*_: object) -> None:
    raise AssertionError("it was told of a child that was never there")


@pytest.mark.parametrize("step", ["socketpair", "Popen", "pidfd_open", "add_reader of the pidfd", "channel"])
async def test_a_child_that_cannot_be_started_or_watched_leaves_nothing(step, last_words, monkeypatch):
    running = asyncio.get_running_loop()
    loop = running
    if step == "socketpair":
        monkeypatch.setattr(socket, "socketpair", _out_of_fds)
    elif step == "Popen":
        monkeypatch.setattr(subprocess, "Popen", _out_of_fds)
    elif step == "pidfd_open":
        monkeypatch.setattr(os, "pidfd_open", _out_of_fds)
    elif step == "channel":
        monkeypatch.setattr("fdasync.ipc.child.Channel", _out_of_fds)
    else:
        # one that refuses, the real one for all else
        class Refuses:
            def __getattr__(self, name: str) -> object:
                return _out_of_fds if name == "add_reader" else getattr(running, name)

        loop = Refuses()  # type: ignore[assignment]
    before = Resources.now()
    with pytest.raises(OSError, match="Too many open files") as caught:
        ChildProcess(loop, "child", last_words, _nobody_hears, _nobody_hears)
    # the error keeps the frames alive: nothing was closed by the garbage collector
    assert Resources.now().left_since(before) == []
    del caught


LEAVES = """
import atexit, os, sys
from fdasync.ipc.child import leave

class Late:
    def __del__(self):
        os.write(1, b"taken apart\\n")

kept = Late()
atexit.register(os.write, 1, b"exit handler\\n")
print("buffered")
leave(7)
"""


def test_a_process_that_leaves_runs_its_exit_handlers_and_is_not_taken_apart():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (7, b"")
    assert sorted(done.stdout.splitlines()) == [b"buffered", b"exit handler"]
