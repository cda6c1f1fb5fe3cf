"""What a test leaves behind, and a blocked loop, are found."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from fdasync.testing import LeakFound, no_leaks, run_sim

# -- leaks --------------------------------------------------------------------------------------------


def test_leaks_of_fds_segments_and_tasks_are_found():
    import mmap
    import os

    fd = -1
    with pytest.raises(LeakFound, match="memfd:left"), no_leaks():
        fd = os.memfd_create("left")
    os.ftruncate(fd, 4096)
    segments = []
    with pytest.raises(LeakFound, match=r"shared segment .*memfd:left"), no_leaks():
        segments.append(mmap.mmap(fd, 4096))
    segments[0].close()
    os.close(fd)

    async def main():
        with no_leaks():
            task = asyncio.create_task(asyncio.sleep(1), name="left-task")
        await task

    with pytest.raises(LeakFound, match="task left-task"):
        run_sim(main())


def test_leaks_of_threads_and_children_are_found():
    import threading

    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(30,), name="left-thread")
    with pytest.raises(LeakFound, match="thread left-thread"), no_leaks():
        thread.start()
    go.set()
    thread.join()
    started = []
    with pytest.raises(LeakFound, match="child process"), no_leaks():
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    started[0].communicate(b"\n")


def test_a_blocking_call_on_a_loop_is_an_error():
    import time

    from blockbuster import BlockingError

    async def main():
        time.sleep(0.001)  # noqa: ASYNC251

    with pytest.raises(BlockingError):
        run_sim(main())
