"""The transport by Mooncake's transfer engine, over RDMA or TCP: for networks that are trusted, and said to be.

Three processes on each side: the instance's, the one of its transports, where this module is, and the engine's
(`engine_main.py`), which has the staging area and nothing else. A receiver asks the sender for a slot's worth of bytes
(`control.py`, `server.py`: a connection that the token of the source opens). The sender copies them from its regions
into its staging area. The receiver's engine reads them into the receiver's staging area. From there they are copied
into place, and **their checksums are taken over that last copy**: whoever writes into either staging area makes the
copy "damaged", and no more. A receive that is over leaves its transfers alone: they end in the staging area, and then
their slots are free.

An engine that dies or hangs is killed and started again; the copies of that moment fail, and may be tried again. Knows
no messages. Made by `plugins.py` of `fdasync_fleet/transfer`.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import xxhash
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import SLICE_NBYTES, Turns
from fdasync_fleet.transfer.endpoint import Endpoint
from fdasync_fleet.transfer.tcp_wire import parse_address
from fdasync_fleet.transfer.validation import CLOSED, boot_id, damaged, refused

from fdasync.cache.store.base import DONE as COPY_DONE
from fdasync.errors import BadInput, FdasyncError, PluginError, ProtocolError, RunnerError
from fdasync.ipc.deadlines import DeadlineTimer, wait_within
from fdasync.ipc.shared_memory import SharedRegion
from fdasync_mooncake.transfer.control import Control
from fdasync_mooncake.transfer.engine import Engine
from fdasync_mooncake.transfer.landing import Landing, Run, slots_worth
from fdasync_mooncake.transfer.server import Server
from fdasync_mooncake.transfer.staging import SLOT_NBYTES, SLOTS, STAGING_NBYTES, Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer

    from fdasync.cache.store.base import Outcome

#: slots that one receive asks for ahead
_WINDOW = 12
# transfers end by themselves, or with the engine's process, which `aclose` has killed
_LANDED_S = 10.0


class MooncakeTransport(Endpoint):
    """See the module.

    Args:
        host: the address, in numbers, by which receivers reach this side; loopback, unless `keyed`. Mooncake's own
            ports listen at all addresses, whatever this is.
        token: token of its source, 16 random bytes; None: drawn.
        keyed: links are authenticated, so senders may be on other machines.
        stuck_s: a peer that owes something for so long is given up.

    Attributes:
        engine: its engine, once open.
    """

    name: ClassVar[str] = "mooncake"
    needs_trust: ClassVar[bool] = True
    takes_host: ClassVar[bool] = True
    _regions: Sequence[SharedRegion]

    def __init__(
        self, host: str = "127.0.0.1", token: bytes | None = None, *, keyed: bool = False, stuck_s: float = 5.0
    ) -> None:
        """Raises BadInput for an address that is malformed, of IPv6, or not loopback without keys."""
        if ":" in host:
            raise BadInput("host", f"{host} is of IPv6, and this transport names engines by IPv4", hint="use tcp")
        try:
            self._host, _ = parse_address(f"{host}:1", keyed=keyed)
        except ProtocolError as error:
            raise BadInput("host", error.problem, hint="leave it out to listen on 127.0.0.1") from None
        super().__init__(token)
        self._keyed = keyed
        self._stuck_s = stuck_s
        self.engine: Engine | None = None
        self._staging: SharedRegion | None = None
        self._slots = Slots(range(SLOTS))
        self._server: Server | None = None
        self._controls: dict[tuple[bytes, str], Control] = {}
        self._landings: set[Landing] = set()
        self._timer: DeadlineTimer | None = None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """As `Transport.open`. Raises PluginError where the engine cannot be had here."""
        self._check_new()
        self._staging = SharedRegion.create("mooncake-staging", STAGING_NBYTES)
        self.engine = Engine(self._host, self._staging, self._engine_ended)
        try:
            await self.engine.start()
        except PluginError:
            raise
        except FdasyncError as error:
            raise PluginError("fdasync.transports", self.name, "fdasync-mooncake", str(error)) from error
        self._offers.open(regions)
        outgoing = Slots(range(SLOTS, 2 * SLOTS))
        self._server = Server(self._token, regions, self._offers, self.engine, outgoing, self._staging, self._stuck_s)
        await self._server.start(self._host)
        if self._closed:
            raise RunnerError("it was closed while it opened")
        self._regions = regions
        sizes = tuple([(region.fd, region.nbytes) for region in regions])
        self._source = Source(
            machine=boot_id(), pid=os.getpid(), regions=sizes, token=self._token, address=self._server.address
        )
        self._sweep()

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        if self._timer is not None:
            self._timer.cancel()
        self._transfers.end(CLOSED)
        if self._server is not None:
            await self._server.aclose()
        while self._controls:
            self._controls.popitem()[1].drop(CLOSED)
        try:
            await self._transfers.idle()
            if self.engine is not None:
                # from now on nothing writes to the staging area
                await self.engine.aclose()
            tasks = [landing.task for landing in self._landings]
            if tasks:
                await wait_within(tasks, _LANDED_S)
        finally:
            self._regions = ()
            if self._staging is not None:
                self._staging.close()

    def _drop(self, token: bytes) -> None:
        for key in [key for key in self._controls if key[0] == token]:
            self._controls.pop(key).drop()

    def _engine_ended(self, error: Exception) -> None:
        # the next use starts another; what was staged in it is told under its old name
        del error

    def _refusal(self, source: Source) -> Outcome | None:
        try:
            parse_address(source.address, keyed=self._keyed)
        except ProtocolError as error:
            return refused(error.problem)
        return None

    async def _copy(
        self, transfer: Transfer, source: Source, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]
    ) -> None:
        assert self.engine is not None
        control = self._control(source)
        batches = slots_worth(copy_specs, outcomes)
        taker = _Taker(self, transfer, copy_specs, outcomes)
        ahead: deque[Landing] = deque()
        try:
            while not transfer.check():
                while len(ahead) < _WINDOW and (runs := next(batches, None)) is not None:
                    landing = Landing(self.engine, self._slots, control, transfer, runs)
                    self._landings.add(landing)
                    landing.task.add_done_callback(partial(self._landed, landing))
                    ahead.append(landing)
                if not ahead:
                    return
                landing = ahead[0]
                while not landing.task.done() and not transfer.check():
                    await transfer.wait(transfer.deadline)
                if transfer.over is not None:
                    return
                if landing.problem is not None:
                    transfer.end(landing.problem)
                    return
                await taker.take(landing)
                ahead.popleft().leave()
        finally:
            for landing in ahead:
                landing.leave()

    def _landed(self, landing: Landing, _task: asyncio.Task[None]) -> None:
        self._landings.discard(landing)

    def _control(self, source: Source) -> Control:
        key = (source.token, source.address)
        found = self._controls.get(key)
        if found is None or found.ended is not None:
            found = Control(source.address, source.token, keyed=self._keyed, stuck_s=self._stuck_s)
            self._controls[key] = found
        return found

    def _sweep(self) -> None:
        """Give up senders that owe something, forget connections that have ended; a timer repeats it."""
        loop = asyncio.get_running_loop()
        for key, control in list(self._controls.items()):
            control.check(loop.time())
            if control.ended is not None:
                del self._controls[key]
        # a DeadlineTimer: a loop that was blocked reads its sockets first
        self._timer = DeadlineTimer(loop, loop.time() + self._stuck_s / 4, self._sweep)

    def staged(self, slot: int, at: int, nbytes: int) -> memoryview:
        """Bytes of a slot."""
        assert self._staging is not None
        return self._staging.view(slot * SLOT_NBYTES + at, nbytes)

    def place(self, part_region: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of our regions."""
        return self._regions[part_region].view(offset, nbytes)


class _Taker:
    """Copies what came into place, and hashes the copy, for one receive; runs of a part come in order."""

    def __init__(
        self,
        transport: MooncakeTransport,
        transfer: Transfer,
        copy_specs: Sequence[CopySpec],
        outcomes: list[Outcome | None],
    ) -> None:
        self._transport = transport
        self._transfer = transfer
        self._copy_specs = copy_specs
        self._outcomes = outcomes
        self._turns = Turns()
        self._hash = xxhash.xxh3_64()

    async def take(self, landing: Landing) -> None:
        """Settle the outcomes of copies that end with these runs; stops where the receive is over."""
        at = 0
        for run, is_offered in zip(landing.runs, landing.offered, strict=True):
            if self._outcomes[run.place] is None:
                if not is_offered:
                    self._outcomes[run.place] = refused("a part of the sender's is not on offer")
                elif not await self._take(landing.slot, at, run):
                    return
            at += run.length

    async def _take(self, slot: int, at: int, run: Run) -> bool:
        copy_spec = self._copy_specs[run.place]
        part = copy_spec.parts[run.part]
        if run.start == 0:
            self._hash = xxhash.xxh3_64()
        for done in range(0, run.length, SLICE_NBYTES):
            if self._transfer.check():
                return False
            nbytes = min(SLICE_NBYTES, run.length - done)
            with self._transport.place(part.region, part.offset + run.start + done, nbytes) as ours:
                with self._transport.staged(slot, at + done, nbytes) as from_:
                    ours[:] = from_
                # over our own copy, where no stranger writes, while the caches hold it
                self._hash.update(ours)
            await self._turns.spend(nbytes)
        if run.start + run.length == part.nbytes:
            if self._hash.intdigest() != copy_spec.checksums[run.part]:
                self._outcomes[run.place] = damaged(run.part)
            elif not any(part.nbytes for part in copy_spec.parts[run.part + 1 :]):
                self._outcomes[run.place] = COPY_DONE
        return True
