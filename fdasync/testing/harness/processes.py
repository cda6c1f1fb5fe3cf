"""Stops a child process for certain, so that it answers nothing. Called by tests and benchmarks."""

from __future__ import annotations

import os
import signal


def stop_process(pid: int) -> None:
    """SIGSTOP a child of this process; returns when every thread of the child stands still.

    After the signal alone threads on other cores run on for some microseconds, and may answer. This call blocks for
    about as long. SIGCONT lets the child go on.
    """
    os.kill(pid, signal.SIGSTOP)
    # the state is left for the parent's own wait
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
