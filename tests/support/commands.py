"""`fdasync serve` and `fdasync up` as real processes on the synthetic runner, for tests of the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fdasync import EngineConfig
from fdasync.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND = [sys.executable, "-c", "from fdasync_command import main; main()"]
RUNNER = {"vocab_size": 100, "block_tokens": 4, "num_blocks": 64, "max_context_tokens": 256}
DEADLINE_S = 300.0


def interruptible() -> None:
    """For a child, before it begins: Ctrl-C ends it, also where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def config_file(folder: Path, runner: dict[str, Any] | None = None, **values: Any) -> Path:
    """A configuration of a small engine on the synthetic runner."""
    config: dict[str, Any] = {
        "runner": "synthetic",
        "runner_config": {**RUNNER, **(runner or {})},
        "process": "inline",
        "max_running": 8,
        "max_step_tokens": 64,
        "host_blocks": 64,
        **values,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def config_of(path: Path) -> EngineConfig:
    return EngineConfig.from_mapping(json.loads(path.read_text()))


class Running:
    """A command that runs, and what it has said on stdout and stderr together."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out

    @property
    def text(self) -> str:
        return self._out.read_text()

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until it has said this."""
        wait_for(lambda: re.search(pattern, self.text) is not None or self.process.poll() is not None, pattern)
        found = re.search(pattern, self.text)
        assert found is not None, f"ended with {self.process.poll()} before {pattern!r}: {self.text}"
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


@contextmanager
def command(folder: Path, *arguments: str, **options: Any) -> Iterator[Running]:
    """Run it, or another `program`; killed at the end if it still runs."""
    out = folder / "out"
    with out.open("ab") as file:
        environment = {**os.environ, "COLUMNS": "160", "TMPDIR": str(folder)}
        begin = options.pop("preexec_fn", None)
        program = options.pop("program", COMMAND)

        def as_from_a_terminal() -> None:
            # the tests may run where it is ignored (nohup), which children inherit
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            if begin is not None:
                begin()

        options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "env": environment, **options}
        process = subprocess.Popen([*program, *arguments], preexec_fn=as_from_a_terminal, **options)
    try:
        yield Running(process, out)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)


def wait_for(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.01)


def children(pid: int) -> dict[str, int]:
    """Processes that `fdasync up` started, by name of their instance."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "--name" in arguments:
            found[arguments[arguments.index("--name") + 1]] = int(child)
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, status: int = 2
) -> str:
    """What the command says on stderr in this process when it ends with an error."""
    monkeypatch.setattr(sys, "argv", ["fdasync", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == status, said
    assert "Traceback" not in said.err
    return said.err
