"""A link names the limit where there are too few open files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci
def test_a_link_names_the_limit_where_a_caller_has_too_few_open_files(tmp_path: Path) -> None:
    script = """
        import asyncio, os, resource, sys
        import fdasync
        from fdasync_fleet.link.zmq_wire import ZmqWire

        async def main():
            left = int(sys.argv[1])
            limit = max(map(int, os.listdir("/proc/self/fd"))) + left
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            wire = ZmqWire()
            try:
                wire.open(b"x" * 16, lambda pipe, frames: None, lambda pipe: None)
                for number in range(100):
                    wire.dial(f"ipc:///no/where/{number}")
            except fdasync.errors.ConfigError as error:
                print(error.field, error.limit == limit, error.hint)
            await wire.aclose()

        asyncio.run(main())
    """
    for left in (1, 12, 60):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(left)],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("open files True say `ulimit -n 1024`"), done
