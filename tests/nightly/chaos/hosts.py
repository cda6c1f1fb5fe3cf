"""Hosts of the chaos harness: network namespaces around a hub, each on a wire of its own that delays, loses and is cut.

Every instance has a host, and so has the harness's process with its router. Knows no processes of theirs. Used by
`chaos.py`, `fleet.py` and `faults.py`; needs root (`tests/system/network/hosts.py`).
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import msgspec

from tests.system.network.forwarder import enter
from tests.system.network.hosts import NETWORKS, Host, Wire

if TYPE_CHECKING:
    from types import TracebackType

#: of each wire; from one instance to another there are two
NETWORK = "region"
_PORT = 7000


class Place(msgspec.Struct):
    """One host.

    Attributes:
        host: the namespace.
        wire: to the hub; `ab` is what the host says, `ba` what it hears.
        ip: its address.
    """

    host: Host
    wire: Wire
    ip: str

    @property
    def address(self) -> str:
        """Where an instance on it listens."""
        return f"tcp://{self.ip}:{_PORT}"


class Hosts:
    """See the module. A context; opened before there is a loop.

    Args:
        count: number of hosts for instances.
        seed: of what is lost.

    Attributes:
        own: the host that `enter` moves this process to.
        free: hosts without an instance.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._ended = ExitStack()
        self.own: Place
        self.free: list[Place] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            hub = stack.enter_context(Host())
            subprocess.run(hub.command(["sysctl", "-qw", "net.ipv4.ip_forward=1"]), check=True)
            places = [self._place(stack, hub, number) for number in range(self._count + 1)]
            self.own, *self.free = places
            self._ended = stack.pop_all()
        return self

    def _place(self, stack: ExitStack, hub: Host, number: int) -> Place:
        delay_s, loss, rate_mbit = NETWORKS[NETWORK]
        ip, gateway = f"10.9.{number}.2", f"10.9.{number}.1"
        host = stack.enter_context(Host())
        wire = stack.enter_context(
            Wire(
                host, hub, ip, gateway, delay_s=delay_s, loss=loss, rate_mbit=rate_mbit, seed=self._seed + number,
                device=f"wire{number}",
            )
        )  # fmt: skip
        route = ["ip", "route", "add", "default", "via", gateway, "dev", "wire"]
        subprocess.run(host.command(route), check=True)
        return Place(host, wire, ip)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.close()

    def enter(self) -> None:
        """Move this process to its own host, for good."""
        enter(self.own.host.pid)
