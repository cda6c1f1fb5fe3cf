"""The sender's side: answers receivers that know the token, and copies what they ask for into the staging area.

Only parts that are on offer are read, slice by slice. A slot belongs to its receiver until that frees it, or until its
connection ends. A receiver that keeps a slot for too long, greets too late or says what is not in the protocol is
dropped; a receiver that keeps as many as it may leaves places for others (`Slots`). Knows no copies. Made by
`transport.py`.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
from collections import deque
from typing import TYPE_CHECKING, cast

from fdasync_fleet.transfer.base import SLICE_NBYTES, Turns
from fdasync_fleet.transfer.tcp_wire import KNOCK_NBYTES, NONCE_NBYTES, PROOF_NBYTES, answer, check_knock, proof

from fdasync.errors import ConfigError, ProtocolError
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync_mooncake.transfer.engine import ENGINE_ERRORS
from fdasync_mooncake.transfer.staging import SLOT_NBYTES
from fdasync_mooncake.transfer.wire import ASKED, MAX_STAGES, Free, Stage, Staged, Unstaged, check_stage, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.transfer.validation import Offers

    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync_mooncake.transfer.engine import Engine
    from fdasync_mooncake.transfer.staging import Slots

#: most connections, and most of them that have not greeted: the oldest such makes room
MAX_CONNECTIONS = 128
MAX_STRANGERS = 32
_GREET_S = 1.0
_BACKLOG = 64
# of answers that a receiver has not read
_UNREAD_NBYTES = 256 << 10


class Server:
    """All receivers that read from us.

    Args:
        engine, slots, staging: for what goes; slots are numbers of places in the staging area.
        stuck_s: a receiver that keeps a slot for so long is dropped.

    Attributes:
        address: host:port that it listens on, once started.
        drops: number of connections that were dropped, by reason.
    """

    def __init__(
        self,
        token: bytes,
        regions: Sequence[SharedRegion],
        offers: Offers,
        engine: Engine,
        slots: Slots,
        staging: SharedRegion,
        stuck_s: float,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.token = token
        self.regions = regions
        self.offers = offers
        self.engine = engine
        self.slots = slots
        self.staging = staging
        self.turns = Turns()
        self.address = ""
        self.drops = {"full": 0, "protocol": 0, "stranger": 0, "stuck": 0}
        self._stuck_s = stuck_s
        self._connections: dict[Receiver, None] = {}
        self._listener: asyncio.Server | None = None
        self._timer: DeadlineTimer | None = None

    async def start(self, host: str) -> None:
        """Listen; `host` is a number. Raises OSError; ConfigError for an address that this machine does not have."""
        try:
            self._listener = await self.loop.create_server(lambda: Receiver(self), host, 0, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            problem = f"{host} is no address of this machine, and Mooncake's ports cannot be reached by another one"
            raise ConfigError("host", problem, hint="behind address translation blocks go by tcp") from None
        self.address = f"{host}:{self._listener.sockets[0].getsockname()[1]}"
        self._sweep()

    def came(self, receiver: Receiver) -> None:
        """A process has dialled."""
        strangers = [one for one in self._connections if not one.greeted]
        if len(strangers) >= MAX_STRANGERS:
            self.drop(strangers[0], "stranger")
        self._connections[receiver] = None
        if len(self._connections) > MAX_CONNECTIONS:
            self.drop(receiver, "full")

    def drop(self, receiver: Receiver, why: str = "") -> None:
        """End a connection; count it under `why` unless it ended in order. Idempotent."""
        if receiver in self._connections:
            del self._connections[receiver]
            receiver.close()
            if why:
                self.drops[why] += 1

    def _sweep(self) -> None:
        now = self.loop.time()
        for receiver in list(self._connections):
            if not receiver.greeted and now - receiver.since > _GREET_S:
                self.drop(receiver, "stranger")
            elif receiver.held_since is not None and now - receiver.held_since > self._stuck_s:
                self.drop(receiver, "stuck")
        # a DeadlineTimer: a loop that was blocked reads its sockets first
        self._timer = DeadlineTimer(self.loop, now + min(_GREET_S, self._stuck_s) / 4, self._sweep)

    async def aclose(self) -> None:
        """Stop listening, drop all; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for receiver in list(self._connections):
            self.drop(receiver)


class Receiver(asyncio.Protocol):
    """The connection of one receiver.

    Attributes:
        greeted: it has shown that it knows the token.
        since: when it came.
    """

    def __init__(self, server: Server) -> None:
        self.greeted = False
        self.since = server.loop.time()
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        # the proof that is awaited; b"": no knock came
        self._proof = b""
        # asked for and not staged yet; staged and not freed: slot, and since when
        self._asked: deque[Stage] = deque()
        # that is being staged, until it is freed
        self._staging: int | None = None
        self._staged: dict[int, tuple[int, float]] = {}
        self._work: asyncio.Task[None] | None = None
        self._checked = False

    @property
    def held_since(self) -> float | None:
        """Since when it has held the slot that it holds longest; None: it holds none."""
        return next((since for _, since in self._staged.values()), None)

    # -- the connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by its class
        self._transport = cast("asyncio.Transport", transport)
        self._server.came(self)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._server.drop(self)

    def close(self) -> None:
        """Close the connection; called by `Server.drop`."""
        if self._work is not None:
            self._work.cancel()
        for slot, _ in self._staged.values():
            # whoever still reads it finds other bytes there, and its checksum says so
            self._server.slots.give(self, slot)
        self._staged.clear()
        self._asked.clear()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        try:
            if self.greeted or self._greet():
                while (message := unpack(self._unread, ASKED)) is not None:
                    self._on(message)
        except ProtocolError:
            self._server.drop(self, "protocol")

    def _say(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > _UNREAD_NBYTES:
            # it asks on, and reads no answer
            self._server.drop(self, "stuck")
            return
        self._transport.write(data)

    def _greet(self) -> bool:
        """Whether it has greeted. Raises ProtocolError unless it knows the token."""
        token = self._server.token
        if not self._proof:
            if len(self._unread) < KNOCK_NBYTES:
                return False
            theirs = check_knock(bytes(self._unread[:KNOCK_NBYTES]), token)
            del self._unread[:KNOCK_NBYTES]
            nonce = os.urandom(NONCE_NBYTES)
            self._proof = proof(token, theirs, nonce)
            self._say(answer(token, theirs, nonce))
        if len(self._unread) < PROOF_NBYTES:
            return False
        if not hmac.compare_digest(bytes(self._unread[:PROOF_NBYTES]), self._proof):
            raise ProtocolError("the process that dialled repeats what another one said")
        del self._unread[:PROOF_NBYTES]
        self.greeted = True
        return True

    # -- requests -------------------------------------------------------------------------------------

    def _on(self, message: Stage | Free) -> None:
        if isinstance(message, Free):
            found = self._staged.pop(message.number, None)
            if found is not None:
                self._server.slots.give(self, found[0])
            elif message.number == self._staging:
                self._staging = None
            else:
                # not staged yet, or refused meanwhile
                self._asked = deque([stage for stage in self._asked if stage.number != message.number])
            return
        check_stage(message)
        if message.number in self._staged or message.number in [self._staging, *(one.number for one in self._asked)]:
            raise ProtocolError(f"request {message.number} is open already")
        if len(self._asked) + len(self._staged) >= MAX_STAGES:
            raise ProtocolError(f"more than {MAX_STAGES} requests at a time")
        self._asked.append(message)
        if self._work is None or self._work.done():
            self._work = self._server.loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Stage what was asked for, in order, until nothing is left; cancelled when the connection ends."""
        server = self._server
        while self._asked:
            slot = await server.slots.take(self)
            try:
                stage, told = None, None
                if self._asked:
                    stage = self._asked.popleft()
                    self._staging = stage.number
                    told = await self._stage(stage, slot)
            except BaseException:
                server.slots.give(self, slot)
                raise
            is_wanted = stage is not None and self._staging == stage.number
            self._staging = None
            if stage is None or not is_wanted or not isinstance(told, Staged):
                server.slots.give(self, slot)
            else:
                self._staged[stage.number] = slot, server.loop.time()
            if told is not None and is_wanted:
                self._say(pack(told))

    async def _stage(self, stage: Stage, slot: int) -> Staged | Unstaged:
        engine = self._server.engine
        try:
            if self._checked:
                await engine.start()
            else:
                # the receiver's engine is about to meet ours, and would hang with it
                await engine.check()
                self._checked = True
        except ENGINE_ERRORS as error:
            self._checked = False
            return Unstaged(stage.number, str(error)[:512])
        start = at = slot * SLOT_NBYTES
        offered = []
        for run in stage.runs:
            offered.append(await self._fill(run.part, run.start, run.length, at))
            at += run.length
        return Staged(
            number=stage.number,
            segment=engine.segment,
            protocol=engine.protocol,
            address=engine.address + start,
            offered=tuple(offered),
        )

    async def _fill(self, part: Part, start: int, length: int, at: int) -> bool:
        """Copy a run to `at`; False: its part is not on offer."""
        server = self._server
        for done in range(0, length, SLICE_NBYTES):
            if part not in server.offers:
                return False
            nbytes = min(SLICE_NBYTES, length - done)
            with (
                server.regions[part.region].view(part.offset + start + done, nbytes) as from_,
                server.staging.view(at + done, nbytes) as into,
            ):
                into[:] = from_
            await server.turns.spend(nbytes)
        return True
