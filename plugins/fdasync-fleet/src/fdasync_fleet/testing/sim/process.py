"""Wires and transports of simulated processes (`fdasync.testing.sim.process`): incoming frames run as callbacks of the
receiving process, and outgoing frames travel on when their process stands still. Called by simulations of fleets."""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync_fleet.testing.sim.network import SimNetwork, SimWire
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.store.base import Outcome
    from fdasync.testing.sim.process import SimProcess
    from fdasync_fleet.link.wire import Frame, Pipe
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer

T = TypeVar("T")


def _outside(work: Callable[..., T], *args: Any) -> T:
    """Call it outside of all processes: timers that it sets fire even when the caller's process stands still."""
    return Context().run(work, *args)


class ProcessWire(SimWire):
    """The wire of a process."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        super().__init__(network, process.name)
        self._process = process

    def open(
        self, name: bytes, on_frames: Callable[[Pipe, list[Frame]], None], on_room: Callable[[Pipe], None]
    ) -> None:
        call = self._process.call
        super().open(name, lambda pipe, frames: call(on_frames, pipe, frames), lambda pipe: call(on_room, pipe))

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        return _outside(super().send, pipe, frames)


class ProcessTransport(SimTransport):
    """The transport of a process.

    Args:
        on_copied: called with the sending transport and each copy spec that was copied whole, before any other event.
    """

    def __init__(
        self, fabric: SimFabric, process: SimProcess, on_copied: Callable[[ProcessTransport, CopySpec], None]
    ) -> None:
        super().__init__(fabric, process.name)
        self._on_copied = on_copied

    async def _copy(self, transfer: Transfer, copy_spec: CopySpec, *, spoil: bool) -> Outcome:
        sender = self._fabric.sender(transfer.token)
        outcome = await super()._copy(transfer, copy_spec, spoil=spoil)
        if outcome.status == "done":
            assert isinstance(sender, ProcessTransport)
            self._on_copied(sender, copy_spec)
        return outcome
