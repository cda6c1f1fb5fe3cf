"""One instance of the chaos harness: `fdasync serve`, and a socket over which it can be asked what it holds.

    python -m benchmarks._chaos_child '{"config": ..., "options": ..., "links": ..., "probe_fd": 3}'

The product's own code serves; the question and its answer are the harness's, and no part of the protocol. One line in,
one line of JSON out (`Probe`). Started by `_chaos_node.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import fdasync.cli.service as serving
from fdasync.engine.config import EngineConfig
from fdasync.errors import FdasyncError
from fdasync.pd.instance.instance import Instance
from fdasync.pd.link.session import LinkConfig
from fdasync.pd.transfer.tcp import TcpTransport
from fdasync.testing.harness.leaks import children

if TYPE_CHECKING:
    from fdasync.pd.messages import Source


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        data_port: of the proxy through which others read its blocks over tcp; 0: they do not.
    """

    config: EngineConfig
    options: serving.ServeOptions
    links: LinkConfig
    probe_fd: int
    data_port: int = 0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance holds at a moment.

    Attributes:
        problem: what `Engine.check` said; "": the books are right.
        held: gauges that are 0 where nothing is under way, by name.
        books: the scheduler's own counters and gauges.
        late: messages that were refused because they came under no lease, here as a lender and as an asker.
        leases: that others have here; granted, or in line.
        tasks: names of the tasks on its loop.
        fds: open files by what they are.
        children: process ids of its worker, its store and so on.
        data_port: where its blocks can be read; 0: not over tcp.
    """

    state: str
    problem: str
    held: dict[str, int]
    books: dict[str, Any]
    late_as_lender: int
    late_as_asker: int
    leases: int
    tasks: list[str]
    fds: dict[str, int]
    children: list[int]
    data_port: int


def probe(instance: Instance) -> Probe:
    engine = instance.engine
    stats = engine.stats()
    books = stats.scheduler
    try:
        engine.check()
        problem = ""
    except FdasyncError as error:
        problem = str(error)
    lending, asking, site = instance._lending, instance._asking, instance._site
    assert site is not None
    held = {
        "live samples": stats.live,
        "requests at the door": stats.at_the_door,
        "steps in flight": stats.steps_in_flight,
        "waiting": books.waiting,
        "running": books.running,
        "leased": books.leased,
        "errands": books.errands,
        "copies in flight": books.moving,
        "blocks being written": books.writing,
        "waits for the store": books.waiting_for_store,
        "late leases of blocks": books.late_leases,
        "blocks lost": books.num_blocks - books.free_blocks - books.idle_blocks,
        "leases in the book": len(lending._book),
        "questions for room": len(asking._by_name),
        "moved and not told": len(asking._moved),
        "answers not told": instance._answers.num_live,
        "services' tasks": len(site.tasks()),
        "services' backlogs": len(site._backlogs),
    }
    return Probe(
        state=stats.state,
        problem=problem,
        held=held,
        books=msgspec.to_builtins(books),
        late_as_lender=lending.late,
        late_as_asker=asking.late,
        leases=len(lending._book),
        tasks=sorted(task.get_name() for task in asyncio.all_tasks()),
        fds=open_files(),
        children=children(),
        data_port=ProxiedTcp.real_port,
    )


def open_files() -> dict[str, int]:
    """Open files of this process by kind: memory by name, sockets, pipes, files by path."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found[target if target.startswith("/") else target.partition(":")[0]] += 1
    return dict(found)


class ProxiedTcp(TcpTransport):
    """Others are told of the proxy's port."""

    port: int = 0
    real_port: int = 0

    def source(self) -> Source:
        source = super().source()
        ProxiedTcp.real_port = int(source.address.rpartition(":")[2])
        return msgspec.structs.replace(source, address=f"127.0.0.1:{self.port}")


class Probed(Instance):
    """An instance that answers the harness once it has started."""

    spec: ChildSpec

    def __init__(self, config: Any, **options: Any) -> None:
        if self.spec.data_port:
            ProxiedTcp.port = self.spec.data_port
            options["transports"] = [ProxiedTcp()]
        super().__init__(config, links=self.spec.links, **options)

    async def start(self) -> None:
        await super().start()
        # its real port is known once it is told
        self._carriers.sources()
        sock = socket.socket(fileno=self.spec.probe_fd)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()

        def answer() -> None:
            try:
                asked = sock.recv(4096)
            except BlockingIOError:
                return
            if not asked:
                loop.remove_reader(sock.fileno())
                return
            sock.send(msgspec.json.encode(probe(self)) + b"\n")

        loop.add_reader(sock.fileno(), answer)


def main() -> int:
    Probed.spec = spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ChildSpec)
    serving.Instance = Probed  # type: ignore[misc]
    return serving.run_serve(spec.config, spec.options)


if __name__ == "__main__":
    sys.exit(main())
