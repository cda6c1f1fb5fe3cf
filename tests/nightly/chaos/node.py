"""One instance of the chaos harness as seen from outside: its process, its faults, and its answers to probes.

A node keeps its address (a proxy's, or its host's) over all of its processes. The end of a process is either expected,
since the harness caused it, or a surprise. Knows no requests. Used by `fleet.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fdasync_fleet.cli.local.options import ServeOptions
from fdasync_fleet.cli.service import Ready

from tests.nightly.chaos.child import ChildSpec, Probe
from tests.nightly.chaos.proxy import Proxy

if TYPE_CHECKING:
    from fdasync_fleet.link.session import LinkConfig

    from fdasync.engine.config import EngineConfig
    from tests.nightly.chaos.hosts import Place

_ROOT = Path(__file__).parents[3]
# a busy machine takes long
START_S = 180.0
_POLL_S = 0.05
_RESTART_S = 0.3
_TAIL_CHARS = 3000
#: modules of child processes of an instance, as they stand on their command lines
WORKER, STORE = "fdasync.runner.worker.main", "fdasync.cache.store.process.main"
TRANSFER = "fdasync_fleet.transfer.process.main"
#: folder of the runner's entry point, in the fleet's
PLUGIN = "plugin"


class Node:
    """See the module.

    Attributes:
        proxy: between the instance and the processes that dial it, unless it has a host.
        data: between the instance and readers of its blocks over tcp; None: blocks travel over shared memory, or it has
            a host.
        place: its host, whose wire others reach it by; None: it is on this one.
        faulted: a fault is in force.
        expected: exit codes of its process that are no surprise now.
        surprises: unexpected ends of its processes, in words.
        starts: how often its process was started.
        ready: its process takes requests.
        process: the current one.
        orphans: pids of the children of its killed processes.
        leaves: it was asked to end for good.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        links: LinkConfig,
        transport: str,
        folder: Path,
        drain_s: float,
        *,
        place: Place | None = None,
        keys: Path | None = None,
    ) -> None:
        """`keys`: file of the fleet's, with `place`."""
        self.name = name
        self.config = config
        self.proxy = Proxy()
        self.data = Proxy() if transport == "tcp" and place is None else None
        self.place = place
        self.faulted = False
        self.expected: set[int] = set()
        self.surprises: list[str] = []
        self.starts = 0
        self.orphans: set[int] = set()
        self.ready = asyncio.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self._links = links
        self._options = ServeOptions(
            listen="", name=name, transport=transport, drain_s=drain_s, parent=os.getpid(),
            json_log=str(folder / f"{name}.jsonl"), keys="" if keys is None else str(keys),
        )  # fmt: skip
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._port = 0
        self._probe: socket.socket | None = None
        self._asking = asyncio.Lock()
        self.leaves = False
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.proxy.port}" if self.place is None else self.place.address

    @property
    def proxies(self) -> list[Proxy]:
        if self.place is not None:
            return []
        return [self.proxy] if self.data is None else [self.proxy, self.data]

    @property
    def role(self) -> str:
        return self.config.role

    @property
    def num_children(self) -> int:
        """Processes that it has when all goes well."""
        workers = self.config.tensor_parallel if self.config.process == "worker" else 0
        return workers + bool(self.config.store)

    def rank_pids(self) -> list[int]:
        """Of the processes that compute, where it is up with all of them; else []."""
        if self.process is None or not self.ready.is_set():
            return []
        if self.config.process != "worker":
            return [self.process.pid]
        pids = self.children().get(WORKER, [])
        return pids if len(pids) == self.config.tensor_parallel else []

    @property
    def is_up(self) -> bool:
        return self.ready.is_set() and not self.faulted

    # -- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        for proxy in self.proxies:
            await proxy.open()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        """Start a process, and another one whenever it ended."""
        failed_starts = 0
        while not self.leaves:
            fd = self._start()
            try:
                started = await self._until_ready(fd)
            finally:
                os.close(fd)
            failed_starts = 0 if started else failed_starts + 1
            assert self.process is not None
            while (status := self.process.poll()) is None:  # noqa: ASYNC110 - a process announces nothing
                await asyncio.sleep(_POLL_S)
            self.ready.clear()
            for proxy in self.proxies:
                proxy.target = 0
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            if status not in self.expected and (started or failed_starts > 2):
                self.surprises.append(f"{self.name} ended with {status} by itself: {self.tail()}")
            if not started:
                self._port = 0
            self.expected = set()
            await asyncio.sleep(_RESTART_S)

    def _start(self) -> int:
        """Start the process; returns the end of the pipe on which it says that it is ready."""
        self.starts += 1
        ours, theirs = socket.socketpair()
        ready, theirs_ready = os.pipe()
        where = f"tcp://127.0.0.1:{self._port}" if self.place is None else self.place.address
        argv = [sys.executable, "-m", "tests.nightly.chaos.child"]
        options = msgspec.structs.replace(self._options, listen=where, ready_fd=theirs_ready)
        spec = ChildSpec(
            config=self.config, options=options, links=self._links, probe_fd=theirs.fileno(),
            data_port=0 if self.data is None else self.data.port,
        )  # fmt: skip
        path = self._folder / f"{self.name}.json"
        path.write_bytes(msgspec.json.encode(spec, enc_hook=str))
        with self._log.open("ab") as log, theirs:
            self.process = subprocess.Popen(
                [*(argv if self.place is None else self.place.host.command(argv)), str(path)],
                cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno(), theirs_ready],
                process_group=0, env=self._environment(),
            )  # fmt: skip
        os.close(theirs_ready)
        ours.setblocking(False)
        self._probe = ours
        return ready

    def _environment(self) -> dict[str, str]:
        """With the runner's entry point on the path, and the package that it names: workers look for it too."""
        path = os.pathsep.join([str(self._folder / PLUGIN), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    async def _until_ready(self, fd: int) -> bool:
        os.set_blocking(fd, False)
        loop = asyncio.get_running_loop()
        until = loop.time() + START_S
        assert self.process is not None
        while loop.time() < until and self.process.poll() is None:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
                continue
            if data:
                said = msgspec.json.decode(data, type=Ready)
                self.proxy.target = self._port = int(said.address.rpartition(":")[2])
                self.ready.set()
                if self.data is not None and (probe := await self.probe()) is not None:
                    self.data.target = probe.data_port
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def end(self) -> None:
        """Ask it to drain and end; it is not started again."""
        self.leaves = True
        self.expected = {0}
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    async def aclose(self, limit_s: float) -> None:
        """End the instance; at the limit its processes are killed."""
        self.end()
        self.kill_now(signal.SIGCONT)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)
            if not self._task.done():
                self.surprises.append(f"{self.name} did not end in {limit_s:g} s: {self.tail()}")
                self.destroy()
                await asyncio.wait([self._task], timeout=10.0)
        for proxy in self.proxies:
            await proxy.aclose()

    def destroy(self) -> None:
        """Kill every process of the instance, at the end of everything."""
        self.leaves = True
        for pid in self.pids():
            _signal(pid, signal.SIGKILL)
        self.kill_now(signal.SIGKILL)

    # -- faults -----------------------------------------------------------------------------------

    def kill_now(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            if number == signal.SIGKILL:
                self.orphans |= set(self.pids())
            self.process.send_signal(number)

    def signal_child(self, module: str, number: int, which: int = 0) -> bool:
        """Send a signal to its store's or transfer process, its worker, or a rank of its group; False: it has none."""
        pids = self.children().get(module, [])
        if which < len(pids):
            _signal(pids[which], number)
        return which < len(pids)

    def pids(self) -> list[int]:
        """Of all of `children`."""
        return [pid for pids in self.children().values() for pid in pids]

    def children(self) -> dict[str, list[int]]:
        """Pids of its workers, as they were started, of its store's and of its transfer process, by module."""
        if self.process is None or self.process.poll() is not None:
            return {}
        found: dict[str, list[int]] = {}
        pid = self.process.pid
        try:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                line = Path(f"/proc/{child}/cmdline").read_text()
                for module in (WORKER, STORE, TRANSFER):
                    if module in line:
                        found.setdefault(module, []).append(int(child))
        except OSError:
            return found
        return found

    # -- probes ---------------------------------------------------------------------------------------

    async def probe(self, limit_s: float = 10.0) -> Probe | None:
        """What the instance holds; None: it does not answer."""
        sock = self._probe
        if sock is None or not self.ready.is_set():
            return None
        loop = asyncio.get_running_loop()
        data = b""
        try:
            # one question at a time, and no answer to one that was given up
            async with asyncio.timeout(limit_s), self._asking:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(1 << 24)
                await loop.sock_sendall(sock, b"probe\n")
                while not data.endswith(b"\n"):
                    more = await loop.sock_recv(sock, 1 << 20)
                    if not more:
                        return None
                    data += more
        except (OSError, TimeoutError):
            return None
        return msgspec.json.decode(data, type=Probe)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TAIL_CHARS:] if self._log.exists() else ""


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
