"""Stopping a child process for real, so that what must not answer does not. Called by tests and benchmarks."""

from __future__ import annotations

import os
import signal


def stop_process(pid: int) -> None:
    """SIGSTOP a child of this process; returns when every thread of it stands still.

    The signal alone does not say so: threads on other cores go on for some microseconds, and may answer. Blocks for
    about as long. SIGCONT lets it go on.
    """
    os.kill(pid, signal.SIGSTOP)
    # left for whoever reaps it
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
