"""`fdasync top` as a user meets it: in a real terminal, piped, and of instances that are not there."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import COMMAND, DEADLINE_S, command, config_file, errors, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.commands import Running

_SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Terminal:
    """A real terminal and the program in it. Knows the few sequences that a screen needs, and fails at any other.

    Attributes:
        rows, columns: of it.
        cells: what it shows.
        homes: how often the screen was begun anew.
        cleared: how often it was cleared as a whole, which flickers.
        alternate: the alternate screen is shown.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.fd, self.theirs = os.openpty()
        self.homes = self.cleared = 0
        self.alternate = False
        self.raw = ""
        self._pending = ""
        # screens of the size before may still be on their way
        self._stale_homes = 0
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._stale_homes = 3
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        os.close(self.theirs)

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    def until(self, met: str) -> str:
        """Read until the screen shows this; returns the screen."""
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(met, "\n".join(self.lines)):
            assert time.monotonic() < deadline, f"{met!r} did not come: {self.lines}"
            self.read(1.0)
        return "\n".join(self.lines)

    def read(self, seconds: float) -> None:
        if select.select([self.fd], [], [], seconds)[0]:
            try:
                said = os.read(self.fd, 1 << 16).decode(errors="replace")
            except OSError:
                # nobody has it open any more
                return
            self.raw += said
            self._take(said)

    def _take(self, said: str) -> None:
        text, self._pending = self._pending + said, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None:
                    assert len(text) - at < 20, f"an unknown sequence: {text[at : at + 20]!r}"
                    self._pending = text[at:]
                    return
                self._obey(found[1], found[2])
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def _obey(self, values: str, verb: str) -> None:
        if verb == "H":
            self._row = self._column = 0
            self.homes += 1
            self._stale_homes -= 1
        elif verb == "J":
            self.cleared += 1
            self.cells = [[" "] * self.columns for _ in range(self.rows)]
        elif (values, verb) in (("?1049", "h"), ("?1049", "l")):
            self.alternate = verb == "h"
            self.cells = [[" "] * self.columns for _ in range(self.rows)]
        else:
            assert verb == "m" or values == "?25", f"an unknown sequence: {values!r} {verb}"

    @property
    def _is_strict(self) -> bool:
        return self.alternate and self._stale_homes < 0

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row += 1
            # a screen that scrolls would show nothing at its top
            assert self._row < self.rows or not self._is_strict, "the screen scrolled"
            self._row = min(self._row, self.rows - 1)
        else:
            assert self._column < self.columns or not self._is_strict, "a line is longer than the screen is wide"
            if self._column < self.columns:
                self.cells[self._row][self._column] = char
            self._column += 1


@contextmanager
def top(terminal: Terminal, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a terminal; it must have ended at the end."""

    def lead() -> None:
        interruptible()
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, "top", *arguments], stdin=terminal.theirs, stdout=terminal.theirs, stderr=terminal.theirs,
        env={**environment, "TERM": "xterm-256color"}, preexec_fn=lead,
    )  # fmt: skip
    try:
        yield process
        # it may still have to write
        while process.poll() is None:
            terminal.read(0.1)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@contextmanager
def served(folder: Path, name: str = "m0") -> Iterator[tuple[str, Running]]:
    """The address of an instance, and its process."""
    (folder / name).mkdir()
    address = f"ipc://{folder}/{name}/link"
    arguments = ("serve", "--config", str(config_file(folder / name)), "--role", "mixed", "--name", name)
    with command(folder / name, *arguments, "--listen", address) as running:
        running.until("ready at ")
        yield address, running
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text


@pytest.mark.ci
def test_a_terminal_of_80_x_24_shows_all_of_it_without_flicker_and_follows_its_size(tmp_path: Path) -> None:
    with (
        Terminal(24, 80) as terminal,
        served(tmp_path) as (address, _),
        top(terminal, address, "--interval", "0.2") as process,
    ):
        screen = terminal.until(r"m0 .*running")
        assert terminal.alternate
        assert screen.startswith("fdasync top  synthetic  weights 0  1 engine\n")
        for name in ("requests", "tokens/s", "latency", "hits", "blocks", "slots", "experts"):
            assert re.search(rf"^{name} ", screen, re.MULTILINE), screen
        seen = terminal.homes
        while terminal.homes < seen + 3:
            terminal.read(1.0)
        # drawn over, never cleared
        assert terminal.cleared == 0
        terminal.resize(10, 40)
        os.killpg(process.pid, signal.SIGWINCH)
        seen, terminal.raw = terminal.homes, ""
        while terminal.homes < seen + 6:
            terminal.read(1.0)
        screen = terminal.until(r"(?m)^m0 ")
        assert screen.startswith("fdasync top  synthetic  weights 0  1 en…\n")
        # other keys leave the screen as it is
        os.write(terminal.fd, b"hello\r\n")
        seen = terminal.homes
        while terminal.homes < seen + 3:
            terminal.read(1.0)
        assert "hello" not in terminal.raw
        os.write(terminal.fd, b"\x03")
        while process.poll() is None:
            terminal.read(0.1)
        terminal.read(0.1)
        assert process.returncode == 0
        assert not terminal.alternate, "the user's own screen is not back"
        assert "Traceback" not in terminal.raw
        assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[H"), "the cursor stays hidden"


@pytest.mark.nightly
def test_it_stays_when_an_instance_ends_and_says_so(tmp_path: Path) -> None:
    with (
        Terminal(24, 80) as terminal,
        served(tmp_path) as (stays, _),
        served(tmp_path, "m1") as (ends, other),
        top(terminal, stays, ends, "--interval", "0.2") as process,
    ):
        terminal.until(r"(?s)m0 .*running.*m1 .*running")
        other.signal(signal.SIGTERM)
        screen = terminal.until(r"m1 .*away")
        assert re.search(r"m0 .*running", screen)
        assert re.search(r"(?m)^! m1: ", screen)
        os.write(terminal.fd, b"q")
    assert process.returncode == 0


@pytest.mark.nightly
def test_piped_it_is_text_and_json(tmp_path: Path) -> None:
    with served(tmp_path) as (address, _):

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [*COMMAND, "top", address, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=True
            )
            assert done.stderr == ""
            return done.stdout

        text = run("--once")
        assert text.startswith("fdasync top  synthetic  weights 0  1 engine\n")
        assert "\x1b" not in text
        (line,) = run("--once", "--json").splitlines()
        told = json.loads(line)
        assert [(one["name"], one["state"]) for one in told["engines"]] == [("m0", "running")]
        assert told["engines"][0]["stats"]["scheduler"]["free_blocks"] == 64
        assert told["problems"] == []
        # without --once text follows text until nobody reads any more
        piped = subprocess.Popen(
            [*COMMAND, "top", address, "--json", "--interval", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert piped.stdout is not None
        assert piped.stderr is not None
        assert [json.loads(piped.stdout.readline())["model"] for _ in range(2)] == ["synthetic", "synthetic"]
        piped.stdout.close()
        assert piped.wait(DEADLINE_S) == 0
        assert piped.stderr.read() == ""
        piped.stderr.close()


@pytest.mark.parametrize(("arguments", "said"), [
    (["ipc:///run/nobody/is/here", "--connect-s", "0.2"], "nobody/is/here"),
    (["http://127.0.0.1:1/"], "127.0.0.1:1"),
    (["http://127.0.0.1:1/"], "an instance by its address, ipc:// or tcp://"),
    (["HTTP://127.0.0.1:1/"], "Connection refused"),
    (["127.0.0.1:30000"], "is named by its URL, http://HOST:PORT"),
    (["localhost"], "is named by its URL, http://HOST:PORT"),
    (["tcp://127.0.0.1:1", "--connect-s", "0.2"], "is named by its URL, http://HOST:PORT"),
    (["http://127.0.0.1:1/", "ipc:///run/m0"], "one URL, or addresses"),
    (["http://127.0.0.1:x/"], "no port"),
    (["http://"], "no URL"),
    (["ipc:///run/m0", "--api-key-file", "KEY"], "--keys has those of a fleet"),
    (["http://127.0.0.1:1/", "--keys", "KEY"], "--api-key-file"),
])  # fmt: skip
def test_what_cannot_be_seen_is_said(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-0123456789abcdef")
    words = [str(tmp_path / "key") if one == "KEY" else one for one in arguments]
    assert said in errors(capsys, monkeypatch, "top", *words, "--once")
