"""What moves frames between processes: a contract. It knows no messages, no sessions and no order.

A wire may lose, repeat, delay and reorder what it carries, and connects again by itself; a link (`links.py`) makes of
that what instances can rely on. Two are there: `zmq_wire.py` for processes, `fdasync.testing.sim.network` for tests in
virtual time. Called by links only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Frame = bytes | memoryview
#: bytes of the name that a process has on a wire; the first is never zero
NAME_NBYTES = 16


class Pipe:
    """One way to one other process, and back; compared by identity. Wires derive their own from it.

    Attributes:
        address: what was dialed; "" where the other side dialed us.
        is_cut: where the other side dialed us: its connection was closed when something was last sent.
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

        `on_frames(pipe, frames)` is called from the loop for what arrives, never from within `send`, `dial` or
        `listen`; a pipe that somebody else dialed appears with its first frames. The frames are the callee's.
        `on_room(pipe)` is called when a pipe connected, and when one that refused frames may take them again; it may
        come without need.

        Args:
            name: of this process, NAME_NBYTES bytes that no other process has or had.
        """

    @abstractmethod
    def listen(self, address: str) -> str:
        """Take pipes that others dial. Returns the actual address, where the port was 0 or `*`.

        Raises ConfigError for an address that is no `ipc://path` or `tcp://127.0.0.1:port`, that is too long, or
        that somebody listens at; it names the address.
        """

    @abstractmethod
    def dial(self, address: str) -> Pipe:
        """A new pipe to whoever listens at this address, now or later; returns at once and never gives up.

        Raises ConfigError as `listen` does.
        """

    @abstractmethod
    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        """Send 1 or 2 frames as one. True: they may arrive, and are copied or kept; do not change them.

        False: the pipe is full, or not connected; nothing was sent, and `on_room` follows when that has changed. Frames
        may be sent to a pipe that was hung up; they go nowhere.
        """

    @abstractmethod
    def hang_up(self, pipe: Pipe) -> None:
        """Forget a pipe; idempotent. One that was dialed is closed; if more comes from one that was not, it is new."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close everything; idempotent. No callback is called from here on. Frames not sent yet are dropped."""
