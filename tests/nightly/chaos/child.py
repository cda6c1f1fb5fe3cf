"""One instance of the chaos harness: `fdasync serve`, with a socket on which the harness asks what the instance holds.

    python -m tests.nightly.chaos.child FILE

The product's own code serves; the question and its answer are the harness's, and no part of the protocol. A question is
one line, an answer is one line of JSON (`Probe`). Started by `node.py`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fdasync_fleet.cli.service as serving
import msgspec
from fdasync_fleet.cli.local.options import ServeOptions
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.instance.peer_verbs import PeerVerbs
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.transfer.process.proxy import ProcessTransport

from fdasync.engine.config import EngineConfig
from fdasync.errors import FdasyncError
from fdasync.testing.harness.leaks import Resources, children

if TYPE_CHECKING:
    from fdasync_fleet.instance.peer_verbs import Claims
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import Source


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        config, options, links: of the instance, as `fdasync serve` takes them.
        probe_fd: of the socket for questions.
        data_port: of the proxy through which other instances read its blocks over tcp; 0: they do not.
    """

    config: EngineConfig
    options: ServeOptions
    links: LinkConfig
    probe_fd: int
    data_port: int = 0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance holds at a moment.

    Attributes:
        state: of the engine.
        problem: what `Engine.check` said; "": its checks passed.
        held: gauges that are 0 where nothing is under way, by name.
        scheduler_stats: the scheduler's own counters and gauges.
        late_decode: messages that the decode side of this instance refused because they came under no lease.
        tasks: names of the tasks on its loop.
        fds: open files by what they are.
        sockets: each open one, in words.
        children: process ids of its worker, its store and so on.
        data_port: where its blocks can be read; 0: not over tcp.
        broken: why its weights cannot be used; "": they can.
        paused: its scheduler plans no steps.
        asleep, released: it sleeps; the parts whose memory is not there.
        dropped: a sleep has dropped its weights, and they have not come again.
        update: label of the last update that a router has told it of, and what came of it: "" while it goes on and
            after it succeeded, else the name of its error.
    """

    state: str
    problem: str
    held: dict[str, int]
    scheduler_stats: dict[str, Any]
    late_decode: int
    tasks: list[str]
    fds: dict[str, int]
    sockets: list[str]
    children: list[int]
    data_port: int
    broken: str
    paused: bool
    asleep: bool
    released: list[str]
    dropped: bool
    update: tuple[str, str]


def probe(instance: Instance, update: tuple[str, str] = ("", "")) -> Probe:
    engine = instance.engine
    stats = engine.stats()
    scheduler_stats = stats.scheduler
    try:
        engine.check()
        problem = ""
    except FdasyncError as error:
        problem = str(error)
    # what failed holds connections in cycles until they are collected, which an idle process does not
    gc.collect()
    prefill_service, decode_service = instance._prefill_service, instance._decode_service
    context, control = instance._context, instance._weights.control
    assert context is not None
    held = {
        "live samples": stats.live,
        "requests in the frontend": stats.waiting_for_place,
        "steps in flight": stats.steps_in_flight,
        "waiting": scheduler_stats.waiting,
        "running": scheduler_stats.running,
        "leased": scheduler_stats.leased,
        "hand-offs": scheduler_stats.hand_offs,
        "copies in flight": scheduler_stats.moving,
        "blocks being written": scheduler_stats.writing,
        "waits for the store": scheduler_stats.waiting_for_store,
        "late transfers": scheduler_stats.late_transfers,
        "blocks lost": scheduler_stats.num_blocks - scheduler_stats.free_blocks - scheduler_stats.idle_blocks,
        "leases": len(decode_service._leases),
        "lease requests": len(prefill_service._by_name),
        "moved and not confirmed": len(prefill_service._moved),
        "responses not sent": instance._responses.num_live,
        "services' tasks": len(context.tasks()),
        "services' backlogs": len(context._backlogs),
        "sleeps": int(control.sleeps),
        "sets of weights broken or dropped": int(control.weights != "in_place"),
    }
    return Probe(
        state=stats.state,
        problem=problem,
        held=held,
        scheduler_stats=msgspec.to_builtins(scheduler_stats),
        late_decode=decode_service.late,
        tasks=sorted(task.get_name() for task in asyncio.all_tasks()),
        fds=open_files(),
        sockets=open_sockets(),
        children=children(),
        data_port=ProxiedTcp.real_port,
        broken="" if control.broken is None else str(control.broken),
        paused=scheduler_stats.paused,
        asleep=control.sleeps,
        released=list(control.released),
        dropped=control.weights == "dropped",
        update=update,
    )


def open_files() -> dict[str, int]:
    """Open files of this process by kind: memory by name, sockets, pipes, files by path."""
    targets = [target for _, target in Resources.now().fds]
    return dict(Counter(target if target.startswith("/") else target.partition(":")[0] for target in targets))


def open_sockets() -> list[str]:
    """Open sockets of this process: descriptor, family, both ends, state of TCP."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] if sock.family == socket.AF_INET else 0
            try:
                other = sock.getpeername()
            except OSError as error:
                other = error.strerror
            found.append(f"{name}: {sock.family.name} {sock.getsockname()} {other} {state}")
    return found


class ProxiedTcp(ProcessTransport):
    """Announces the proxy's port in place of its own."""

    port: int = 0
    real_port: int = 0

    def source(self) -> Source:
        source = super().source()
        ProxiedTcp.real_port = int(source.address.rpartition(":")[2])
        return msgspec.structs.replace(source, address=f"127.0.0.1:{self.port}")


class TellingVerbs(PeerVerbs):
    """Tells what came of each update, for the probe."""

    def __init__(self, node: Probed, claims: Claims, peer: Peer) -> None:
        super().__init__(node.engine, claims, peer, node.drain)
        self._node = node

    async def update_weights(self, version: str, *args: Any, **kwargs: Any) -> None:
        self._node.update = (version, "")
        try:
            await super().update_weights(version, *args, **kwargs)
        except FdasyncError as error:
            self._node.update = (version, type(error).__name__)
            raise


class Probed(Instance):
    """An instance that answers the harness once it has started."""

    spec: ChildSpec

    def __init__(self, config: Any, **options: Any) -> None:
        self.update = ("", "")
        super().__init__(config, links=self.spec.links, **options)
        if self.spec.data_port:
            ProxiedTcp.port = self.spec.data_port
            assert self._process is not None
            (transport,) = self._process.transports
            # what it says of itself is all that differs
            transport.__class__ = ProxiedTcp

    def _verbs_of(self, peer: Peer) -> PeerVerbs:
        return TellingVerbs(self, self._claims, peer)

    async def start(self) -> None:
        await super().start()
        # `source` learns the real port
        self._transports.sources()
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
            sock.send(msgspec.json.encode(probe(self, self.update)) + b"\n")

        loop.add_reader(sock.fileno(), answer)


def main() -> int:
    Probed.spec = spec = msgspec.json.decode(
        Path(sys.argv[1]).read_bytes(), type=ChildSpec, dec_hook=lambda kind, value: kind(value)
    )
    serving.Instance = Probed  # type: ignore[misc]
    return serving.run_serve(spec.config, spec.options)


if __name__ == "__main__":
    sys.exit(main())
