"""Looks for the parts of this machine that an engine can use, and says what is missing for what.

Imports nothing heavy. Called by `main.py`.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from fdasync.cli.common.plugins import checked_plugins
from fdasync.errors import ConfigError
from fdasync.ipc.gpu_locks import held_by, holders
from fdasync.ipc.gpus import visible

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGES = (
    ("uvloop", "the engine's loop", True),
    ("msgspec", "events, messages, config", True),
    ("numpy", "routing rows", True),
    ("xxhash", "checksums of stored blocks", True),
    ("prometheus_client", "metrics", True),
    ("torch", "runners on real models", False),
    ("transformers", "the transformers runner", False),
    ("tokenizers", "text in and out", False),
    ("triton", "kernels of the transformers runner on GPUs", False),
    ("pyzmq", "links between instances", False),
    ("hypothesis", "conformance suites in fdasync.testing", False),
    ("blockbuster", "the no-blocking fixture in fdasync.testing", False),
)
_MIN_FILES = 1024
_CHILD_S = 10.0

State = Literal["ok", "missing", "broken"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part that was looked at.

    Attributes:
        what: its name.
        state: "missing" parts can be installed or allowed; "broken" parts are there and do not work.
        found: its version or size, or the problem.
        needed_for: what an engine does with it.
        essential: no engine runs without it.
    """

    what: str
    state: State
    found: str
    needed_for: str = ""
    essential: bool = False


def examine() -> list[Finding]:
    """All findings; takes some seconds where plugins are heavy."""
    findings = [_python(), _linux(), *_packages(), *_kernel(), _shared_memory(), *_limits(), _device()]
    findings += [
        Finding(
            what=f"plugin {info.name} ({info.group})",
            state="broken" if info.problem else "ok",
            found=info.problem or f"{info.distribution} {info.version}",
            needed_for="engines that name it",
        )
        for info in checked_plugins()
    ]
    findings.append(_mooncake())
    return findings


def _mooncake() -> Finding:
    """Found and not imported: its native parts belong into a store's process."""
    for wheel in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            found = f"{wheel} {version(wheel)}"
        except PackageNotFoundError:
            continue
        library = ctypes.util.find_library("ibverbs")
        return Finding(
            what="mooncake", state="ok" if library else "broken",
            found=found if library else f"{found}, but libibverbs is not there (Debian: libibverbs1)",
            needed_for="the store of fdasync-mooncake",
        )  # fmt: skip
    return Finding(
        what="mooncake", state="missing", found="not installed", needed_for="the store of fdasync-mooncake",
    )  # fmt: skip


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        what="Python", state="ok" if good else "broken", found=platform.python_version(), needed_for="3.11 or newer",
        essential=True,
    )  # fmt: skip


def _linux() -> Finding:
    good = sys.platform == "linux"
    return Finding(
        what="Linux", state="ok" if good else "broken", found=f"{platform.system()} {platform.release()}",
        needed_for="memfd, pidfd, eventfd", essential=True,
    )  # fmt: skip


def _packages() -> list[Finding]:
    findings = []
    for name, purpose, essential in _PACKAGES:
        state: State = "ok"
        try:
            found = version(name)
        except PackageNotFoundError:
            found, state = "not installed", "missing"
        findings.append(Finding(what=name, state=state, found=found, needed_for=purpose, essential=essential))
    return findings


def _kernel() -> list[Finding]:
    findings = []
    probes: tuple[tuple[str, Callable[[], int], str], ...] = (
        ("memfd_create", lambda: os.memfd_create("fdasync-doctor"), "shared arenas"),
        ("pidfd_open", lambda: os.pidfd_open(os.getpid()), "watching workers"),
        ("eventfd", lambda: os.eventfd(0), "device completions (not used yet)"),
    )
    for what, call, purpose in probes:
        try:
            os.close(call())
            findings.append(Finding(what=what, state="ok", found="works", needed_for=purpose, essential=True))
        except OSError as error:
            findings.append(Finding(what=what, state="broken", found=str(error), needed_for=purpose, essential=True))
    return findings


def _shared_memory() -> Finding:
    """Whether another process of this user can open memory of ours, as the shm transport does."""
    word, purpose = "fdasync-doctor", "blocks between instances of this machine by shm; else they go by tcp"
    fd = os.memfd_create(word)
    try:
        os.pwrite(fd, word.encode(), 0)
        script = f"import os; print(os.pread(os.open('/proc/{os.getpid()}/fd/{fd}', os.O_RDONLY), 64, 0).decode())"
        done = subprocess.run(
            [sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=_CHILD_S, check=False
        )
        works, said = done.stdout.strip() == word, (done.stderr.strip().splitlines() or ["nothing came back"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        works, said = False, str(error)
    finally:
        os.close(fd)
    return Finding(
        what="memory between processes", state="ok" if works else "missing", found="works" if works else said,
        needed_for=purpose,
    )  # fmt: skip


def _limits() -> list[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    uring = disabled.read_text().strip() if disabled.exists() else "unknown"
    return [
        Finding(
            what="open files limit", state="ok" if files >= _MIN_FILES else "missing", found=str(files),
            needed_for=f"at least {_MIN_FILES} (ulimit -n)",
        ),
        Finding(
            what="locked memory limit", state="ok",
            found="unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:.0f} MB",
            needed_for="pinned arenas on GPUs (ulimit -l)",
        ),
        Finding(what="CPUs", state="ok", found=str(len(os.sched_getaffinity(0))), needed_for="CPU runners"),
        Finding(what="memory", state="ok", found=f"{memory:.1f} GB", needed_for="weights, KV, arenas"),
        Finding(
            what="io_uring", state="ok" if uring == "0" else "missing",
            found={"0": "allowed", "1": "for root only", "2": "forbidden"}.get(uring, uring),
            needed_for="nothing so far: the file store works without it",
        ),
    ]  # fmt: skip


def _device() -> Finding:
    gpus = visible()
    told = "not known here" if gpus is None else f"{len(gpus)}" if gpus else "none"
    try:
        held = [f"{gpu} is held by {held_by(gpu)}" for gpu in gpus or () if holders(gpu)]
    except ConfigError as error:
        held = [str(error)]
    return Finding(
        what="NVIDIA GPUs",
        state="ok" if gpus else "missing",
        found="; ".join([told, *held]),
        needed_for="speed; the CPU works fully",
    )
