"""Defines a `Wire`, which moves frames between processes: a contract.

A wire may lose, repeat, delay and reorder frames, and connects again by itself; `session.py` makes that reliable. There
are two: `zmq_wire.py`, and `fdasync_fleet.testing.sim.network` for tests in virtual time. Knows no messages, no
sessions and no order. Called by links only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Frame = bytes | memoryview
#: bytes of a process's name on a wire; the first is never zero
NAME_NBYTES = 16


class Pipe:
    """A connection to one other process, in both directions; compared by identity. Wires derive their own from it.

    Attributes:
        address: the address that we dialed; "" if the other side dialed us.
        is_cut: the other side dialed us, and its connection was closed when a frame was last sent.
    """

    __slots__ = ("address", "is_cut")

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_cut = False


class Wire(ABC):
    """See the module. Used from one loop; nothing here waits but `aclose`."""

    @abstractmethod
    def open(
        self,
        name: bytes,
        on_frames: Callable[[Pipe, list[Frame]], None],
        on_room: Callable[[Pipe], None],
    ) -> None:
        """Called once, on the loop, before anything else.

        `on_frames(pipe, frames)` is called from the loop for frames that arrive, never from within `send`, `dial` or
        `listen`; a pipe that another process dialed appears with its first frames. The frames belong to the callee.
        `on_room(pipe)` is called when a pipe has connected, and when a pipe that refused frames may take them again; it
        may be called without need.

        Args:
            name: name of this process: NAME_NBYTES bytes that no other process has or had.
        """

    @abstractmethod
    def listen(self, address: str) -> str:
        """Accept pipes that others dial. Returns the actual address, if the port was 0 or `*`.

        Raises ConfigError, which names the address, if it is no `ipc://path` or `tcp://127.0.0.1:port`, is too long,
        or a process listens there.
        """

    @abstractmethod
    def dial(self, address: str) -> Pipe:
        """A new pipe to the process that listens at this address, now or later; returns at once and never gives up.

        Raises ConfigError as `listen` does.
        """

    def is_absent(self, address: str) -> bool:  # noqa: ARG002 - of the wires that know
        """Whether it is certain that no process listens at an address now; False where only an answer would show."""
        return False

    @abstractmethod
    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        """Send 1 or 2 frames as one. True: they may arrive, and are copied or kept; do not change them.

        False: the pipe is full or not connected; nothing was sent, and `on_room` follows when that has changed. Frames
        for a pipe that was hung up are dropped.
        """

    def redial(self, pipe: Pipe) -> None:  # noqa: B027 - a wire whose connections cannot die unnoticed has nothing to do
        """Give up the connection of a pipe that we dialed, which may be dead, and make another one. Frames on their way
        may be lost; `on_room` follows when it has connected."""

    @abstractmethod
    def hang_up(self, pipe: Pipe) -> None:
        """Forget a pipe; idempotent. A pipe that we dialed is closed; later frames of another pipe come with a new
        one."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close everything; idempotent. No callback is called from here on. Frames not sent yet are dropped."""
