"""Starts and ends the instances of a benchmark, and counts the CPU that they and the machine spent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.fleet.pd_process import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Fleet:
    """Running instances.

    Attributes:
        processes: by name.
        addresses: where they listen, by name.
    """

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.addresses: dict[str, str] = {}

    def kill(self, name: str) -> None:
        self.processes[name].kill()


@contextlib.contextmanager
def fleet(instances: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Fleet]:
    """Start instances, each by its name and the keys of its `Spec` but the address; all are ready in the body."""
    running = Fleet()
    with tempfile.TemporaryDirectory(prefix="fdasync-bench-") as folder:
        try:
            for name, keys in instances:
                address = f"ipc://{folder}/{name}"
                spec = Spec(address=address, **keys)
                command = [sys.executable, "-m", "benchmarks.fleet.pd_process", msgspec.json.encode(spec).decode()]
                running.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                running.addresses[name] = address
            for name, process in running.processes.items():
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError(f"{name} did not start")
            yield running
        finally:
            for process in running.processes.values():
                process.terminate()
            for process in running.processes.values():
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def busy_s() -> tuple[float, float]:
    """CPU seconds that all processes of this machine spent, and CPU seconds that it had, since its start."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - fields[3] - fields[4]) / tick, sum(fields) / tick
