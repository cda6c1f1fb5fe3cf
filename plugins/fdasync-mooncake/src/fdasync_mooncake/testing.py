"""For tests and benchmarks: a real master, a process that lends memory, and a network that has only loopback.

The client's ports cannot be bound to loopback, so a test runs it in a network namespace of its own (root only). All
calls block: make them outside of an event loop. Called by tests and benchmarks.
"""

from __future__ import annotations

import ctypes
import fcntl
import http.client
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync.errors import StoreUnavailable
from fdasync.ipc.child import die_with_parent
from fdasync.testing.harness.processes import stop_process
from fdasync_mooncake.usage import read_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_HOST = "127.0.0.1"


class LoopbackNamespace:
    """A network namespace that has only loopback, kept alive until `close`. Raises OSError where that is forbidden."""

    def __init__(self) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _libc_call("unshare", _CLONE_NEWNET)
            try:
                self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                _loopback_up()
            finally:
                _libc_call("setns", home, _CLONE_NEWNET)
        finally:
            os.close(home)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this thread's new sockets and processes are in the namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _libc_call("setns", self._fd, _CLONE_NEWNET)
            try:
                yield
            finally:
                _libc_call("setns", home, _CLONE_NEWNET)
        finally:
            os.close(home)

    def close(self) -> None:
        """Let the namespace go; its processes keep it."""
        os.close(self._fd)


@contextmanager
def in_loopback_namespace() -> Iterator[None]:
    """A namespace for the length of the block. Raises OSError where that is forbidden."""
    namespace = LoopbackNamespace()
    try:
        with namespace.entered():
            yield
    finally:
        namespace.close()


def why_not() -> str:
    """Why no real pool can run here, or ""."""
    try:
        master_binary()
    except FileNotFoundError as error:
        return str(error)
    probe = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        return f"the Mooncake client cannot be imported: {probe.stderr.strip().rpartition(chr(10))[2]}"
    try:
        LoopbackNamespace().close()
    except OSError as error:
        return f"no network namespace of its own (needs root): {error}"
    return ""


def master_binary() -> Path:
    """The master of the installed wheel. Raises FileNotFoundError."""
    return _binary("mooncake_master")


class Server:
    """A process of the wheel: started, waited for, stopped, killed."""

    def __init__(self, argv: Sequence[str | Path], log: Path | None) -> None:
        self._argv = argv
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Raises TimeoutError, ChildProcessError if it does not come up."""
        with open(self._log or os.devnull, "ab") as out:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + 20
        while not self._up():
            if self._process.poll() is not None:
                raise ChildProcessError(f"{self._argv[0]} ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._argv[0]} did not come up")
            time.sleep(0.01)

    def _up(self) -> bool:
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Send SIGSTOP, SIGCONT, ...; after SIGSTOP it returns when the process is stopped."""
        assert self._process is not None
        if number == signal.SIGSTOP:
            stop_process(self._process.pid)
        else:
            self._process.send_signal(number)

    @property
    def gone(self) -> int | None:
        """The exit status of a process that ended without `kill`; None: it runs, or was killed."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """SIGKILL and reap; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(20)


class MasterProcess(Server):
    """A master on 127.0.0.1; `with` starts and kills it. After `kill`, `start` starts an empty one.

    Args:
        port, metrics_port: to listen on.
        protect_ms: how long an object is not evicted after a read or a lookup.
        client_ttl_s: after how many silent seconds a process that lends memory counts as gone.
        log: file of its output, or None.

    Attributes:
        address: of the master, for `MooncakeConfig.master`.
        metrics: of its metrics server, for `MooncakeConfig.metrics`.
    """

    def __init__(
        self,
        port: int = 50051,
        metrics_port: int = 9003,
        protect_ms: int = 5000,
        client_ttl_s: int = 10,
        log: Path | None = None,
    ) -> None:
        self.address = f"{_HOST}:{port}"
        self.metrics = f"{_HOST}:{metrics_port}"
        self._metrics_port = metrics_port
        super().__init__(
            [
                master_binary(),
                f"--rpc_address={_HOST}",
                f"--rpc_port={port}",
                f"--metrics_host={_HOST}",
                f"--metrics_port={metrics_port}",
                f"--default_kv_lease_ttl={protect_ms}",
                f"--client_ttl={client_ttl_s}",
            ],
            log,
        )

    def __enter__(self) -> MasterProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _up(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._metrics_port, timeout=1)
        try:
            connection.request("GET", "/health")
            return b'"service_ready":true' in connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()

    def capacity_nbytes(self) -> int:
        """Memory of the pool, lent by all processes. Raises StoreUnavailable."""
        return read_usage(_HOST, self._metrics_port, 5).capacity_nbytes


class MemoryProcess(Server):
    """Lends memory to the pool of a master on this machine and does nothing else: the wheel's `mooncake_client`."""

    def __init__(self, master: MasterProcess, nbytes: int, port: int = 50052, log: Path | None = None) -> None:
        self._master = master
        self._nbytes = nbytes
        self._before = 0
        super().__init__(
            [
                _binary("mooncake_client"),
                f"--host={_HOST}",
                f"--port={port}",
                f"--global_segment_size={nbytes}",
                f"--master_server_address={master.address}",
                "--metadata_server=P2PHANDSHAKE",
            ],
            log,
        )

    def __enter__(self) -> MemoryProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._before = self._master.capacity_nbytes()
        super().start()

    def _up(self) -> bool:
        try:
            return self._master.capacity_nbytes() >= self._before + self._nbytes
        except StoreUnavailable:
            return False


def _binary(name: str) -> Path:
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / name
        if path.exists():
            return path
    raise FileNotFoundError(f"no {name}: install mooncake-transfer-engine-non-cuda or mooncake-transfer-engine")


def _libc_call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
