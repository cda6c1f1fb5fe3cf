"""Runs tests on a copy of the tree that a mutant was applied to, and says what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.support.outer import outer_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.mutants.mutant import Mutant

#: a mutant may never end to take memory; a test process here takes a third of this
_MOST_NBYTES = 8 << 30
_POLL_S = 0.2
#: how long imports and collecting may take, of all tests on a busy machine
_START_S = 300.0
_MARK = "FDASYNC_MUTANTS_RUN"
Found = Literal["passed", "failed", "crashed", "hung"]


@dataclass(frozen=True)
class Outcome:
    """What came of a run of tests.

    Attributes:
        test: of a failure the test that failed, or that ran when all ended; the file where collecting failed; "" where
            pytest did not begin.
        ended: the tests that ended, that which failed among them.
    """

    found: Found
    test: str = ""
    ended: frozenset[str] = frozenset()


class Stopped(Exception):
    """The tree runs no more tests."""


class Tree:
    """A copy of the repository's files in a folder of its own. Python takes the packages from it, in children too.
    A context manager: the folder goes at its end."""

    def __init__(self, root: Path, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped = False
        self._folder = Path(tempfile.mkdtemp(prefix="fdm-"))
        self.path = self._folder / "tree"
        _copy(root, self.path)
        sources = [self.path, *sorted(self.path.glob("plugins/*/src"))]
        self._environment = {
            **outer_environment(),
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            _MARK: uuid.uuid4().hex,
        }

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """From any thread: end the run that is under way, which raises Stopped, and begin no other."""
        self._stopped = True

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """With the mutant applied. Raises: NotFound, OSError."""
        path = self.path / mutant.path
        source, times = path.read_bytes(), path.stat()
        mutant.apply(self.path)
        # bytecode is told apart by whole seconds, and a mutant may be as long as the source
        os.utime(path, (times.st_atime, times.st_mtime + mutant.number))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, (times.st_atime, times.st_mtime))

    def collect(self, marks: str, files: Iterable[str]) -> list[str]:
        """Ids of all tests of `files` with `marks`, in pytest's order, but for files that cannot be imported here or
        are gone. Raises: RuntimeError: pytest does not begin."""
        collected = self._folder / "collected"
        there = sorted(name for name in files if (self.path / name).is_file())
        _, log = self._run(["--collect-only", "-m", marks, f"--collected={collected}", *there], set(), {})
        if not collected.exists():
            raise RuntimeError(f"tests cannot be collected without a mutant:\n{log}")
        found: list[str] = json.loads(collected.read_text())
        return found

    def run(self, tests: Iterable[str], costs_s: dict[str, float]) -> Outcome:
        """Run tests up to the first failure, file by file, the cheapest file first."""
        by_file: dict[str, float] = {}
        for test in tests:
            name = file_of(test)
            by_file[name] = by_file.get(name, 0.0) + costs_s.get(test, 0.0)
        return self._run(["-x", *sorted(by_file, key=lambda name: by_file[name])], set(tests), costs_s)[0]

    def _run(self, arguments: list[str], chosen: set[str], costs_s: dict[str, float]) -> tuple[Outcome, str]:
        """The outcome, and the end of what pytest wrote."""
        progress, log = self._folder / "progress", self._folder / "log"
        progress.write_text("")
        shutil.rmtree(self.path / ".hypothesis", ignore_errors=True)  # examples that another mutant failed on
        # values after "=": pytest looks for its configuration above all that stands alone
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.chosen", "-q", "-p", "no:cacheprovider"]
        # the same examples of each property in all rings, before and after a change
        command += ["--hypothesis-seed=0", f"--basetemp={self._folder / 't'}", f"--progress={progress}", *arguments]
        if chosen:
            (self._folder / "chosen").write_text(json.dumps(sorted(chosen)))
            command += [f"--chosen={self._folder / 'chosen'}"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.path, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, preexec_fn=_limit_memory,
            )  # fmt: skip
            try:
                hung = self._wait(process, progress, costs_s)
            finally:
                self._kill_all()
                process.wait()
        return outcome_of(progress, process.returncode, hung=hung), log.read_text(errors="replace")[-3000:]

    def _wait(self, process: subprocess.Popen[bytes], progress: Path, costs_s: dict[str, float]) -> bool:
        """Wait for the end, or for a test that hangs: True. Raises: Stopped."""
        at, seen = time.monotonic(), -1
        while process.poll() is None:
            if self._stopped:
                raise Stopped
            size = progress.stat().st_size
            if size != seen:
                at, seen = time.monotonic(), size
            elif time.monotonic() - at > self._limit_of(progress, costs_s):
                return True
            time.sleep(_POLL_S)
        return False

    def _limit_of(self, progress: Path, costs_s: dict[str, float]) -> float:
        begun = [test for what, test in _read(progress) if what == "began"]
        if not begun:
            return max(self._limit_s, _START_S)
        # the record has CPU seconds: a test that waits, or on a busy machine, takes longer
        return self._limit_s + 10 * costs_s.get(begun[-1], 0.0)

    def _kill_all(self) -> None:
        """Kill what the run left: all processes with its mark in their environment."""
        mark = f"{_MARK}={self._environment[_MARK]}".encode()
        for _ in range(10):
            left = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and _has(one, mark)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def _has(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_NBYTES, _MOST_NBYTES))


def _copy(root: Path, to: Path) -> None:
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def _read(progress: Path) -> list[list[str]]:
    return [json.loads(line) for line in progress.read_text().splitlines() if line.endswith("]")]


def outcome_of(progress: Path, status: int, *, hung: bool) -> Outcome:
    told = _read(progress)
    ended = frozenset(test for what, test in told if what == "ended")
    last = told[-1][1] if told else ""
    failed = [test for what, test in told if what == "failed"]
    if failed:
        return Outcome("failed", failed[0], ended)
    if hung:
        return Outcome("hung", last, ended)
    # 5: none of the chosen tests is there
    whole = status in (0, 5) and ended == {test for what, test in told if what == "began"}
    return Outcome("passed", "", ended) if whole else Outcome("crashed", last, ended)
