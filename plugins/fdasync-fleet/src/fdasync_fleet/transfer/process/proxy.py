"""Transports in a process beside an instance's loop: `TransferProcess`, and the proxy of each transport in it.

A copy or a checksum of 200 MB takes some 50 ms of a core. Here it is a message and a wait, while the loop goes on. What
the contract of transports says holds across the two processes: a receive returns when the process has answered it, and
a process that does not answer is killed and reaped first. A process that ended does not come back: its owner is told
once, receives fail, and checksums raise. Knows no blocks and no requests. Made by `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec

from fdasync.errors import (
    FdasyncError,
    InvariantBroken,
    PluginError,
    ProtocolError,
    RunnerError,
    WorkerDied,
    WorkerStuck,
)
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.rpc import RpcClient
from fdasync.registry.registry import TRANSPORTS
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.endpoint import Endpoint
from fdasync_fleet.transfer.process.main import TransferService
from fdasync_fleet.transfer.validation import CLOSED, broken, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.plugins import TransportSpec
    from fdasync_fleet.transfer.transfers import Transfer

P = ParamSpec("P")
T = TypeVar("T")

NAME = "transfer"
_MODULE = "fdasync_fleet.transfer.process.main"
_OPEN_S = 60.0
# checksums of a few hundred MB take a tenth of a second
_CHECKSUMS_S = 30.0
#: how long the process may take to end a call that is over, before it is killed
STOP_S = 5.0
_SOURCE = msgspec.msgpack.Decoder(Source)
_ENDED = (WorkerDied, WorkerStuck, ProtocolError)


class TransferProcess:
    """See the module. The first of its transports that is opened starts the process, the last that is closed ends it.

    Args:
        specs: of the transports in it, in order of preference.

    Attributes:
        transports: their proxies, in that order.
        on_end: called once, with the error, if the process ends by itself or is killed for not answering.
    """

    def __init__(self, specs: Sequence[TransportSpec]) -> None:
        self.on_end: Callable[[Exception], None] | None = None
        self.transports = tuple([ProcessTransport(self, place, spec.name) for place, spec in enumerate(specs)])
        self._specs = tuple(specs)
        self._client: RpcClient | None = None
        # why an optional transport did not open
        self._sources: Sequence[Source | str] = ()
        # places of the transports that are open
        self._users: set[int] = set()
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id; -1 while there is no process."""
        return -1 if self._client is None or self._client.gone.done() else self._client.process.pid

    async def checksums(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """XXH3-64 of each part of the regions. Cancelling ends it when the process has stopped it.

        Raises WorkerDied, ProtocolError where the process ended, WorkerStuck where it does not answer, InvariantBroken
        for a part outside of the regions, or before `open` and after `aclose`.
        """
        if not parts:
            return ()
        call = asyncio.ensure_future(self._running.ask(TransferService.checksums, parts))
        try:
            await wait_within([call], _CHECKSUMS_S)
            if not call.done():
                await self._kill("checksums", _CHECKSUMS_S)
            return await call
        finally:
            await self.stop(call)

    # -- for the proxies ------------------------------------------------------------------------------

    @property
    def _running(self) -> RpcClient:
        if self._client is None or self._closed:
            raise InvariantBroken("the transfer process is not open")
        return self._client

    async def open(self, regions: Sequence[SharedRegion], place: int) -> Source:
        """Start the process, unless another transport did; returns the source of one transport. Raises PluginError if
        it is optional and did not open, and as `_start`."""
        self._users.add(place)
        if self._client is None:
            await self._start(regions)
        found = self._sources[place]
        if isinstance(found, str):
            raise PluginError(TRANSPORTS, self._specs[place].name, "", found)
        return found

    async def _start(self, regions: Sequence[SharedRegion]) -> None:
        """Raises OSError, and what a transport's `open` raises, as RunnerError where it is no error of fdasync."""
        client = self._client = RpcClient(asyncio.get_running_loop(), NAME, _MODULE, TransferService.errors)
        try:
            opened = client.call(TransferService.open, self._specs, regions)
            await wait_within([opened], _OPEN_S)
            if not opened.done():
                await self._kill("opening its transports", _OPEN_S)
            self._sources = opened.result()  # of a future that is done
        except BaseException as error:
            # raised again, once the process is gone
            self._closed = True
            await client.kill(error if isinstance(error, FdasyncError) else RunnerError("it was not opened"))
            raise
        client.gone.add_done_callback(self._gone)

    def tell(
        self, function: Callable[Concatenate[TransferService, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call without waiting for the answer, which says nothing; dropped where the process has ended."""
        if self._client is not None and not self._closed:
            self._client.tell(function, *args, **kwargs)

    def receive(
        self, place: int, source: Source, copy_specs: Sequence[CopySpec], limit_s: float
    ) -> asyncio.Task[list[Outcome]]:
        """Begin a receive; `stop` ends it."""
        return asyncio.ensure_future(self._running.ask(TransferService.receive, place, source, copy_specs, limit_s))

    async def stop(self, call: asyncio.Task[T], *, answers: bool = False) -> None:
        """Have a call end: when this returns, or is cancelled, the process works on it no more.

        `answers`: the process ends it of its own accord soon; else it is asked to stop. Raises DeadlineExceeded where
        the kernel does not let go of a process that was killed for not answering: then the call goes on.
        """
        if call.done():
            return
        if not answers:
            call.cancel()
        cancelled: asyncio.CancelledError | None = None
        until = asyncio.get_running_loop().time() + STOP_S
        while not call.done():
            try:
                left_s = until - asyncio.get_running_loop().time()
                if left_s > 0:
                    await wait_within([call], left_s)
                else:
                    await self._kill("a call that is over", STOP_S)
            except asyncio.CancelledError as error:
                if not cancelled:
                    call.cancel()
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def aclose(self, place: int) -> None:
        """A transport is closed; the last one ends the process, which is gone on return. Idempotent.

        Raises DeadlineExceeded where the kernel does not let go of the process.
        """
        self._users.discard(place)
        if self._client is not None and not self._users:
            self._closed = True
            await self._client.close(RunnerError("the transports are closed"), STOP_S)

    async def _kill(self, what: str, limit_s: float) -> None:
        assert self._client is not None
        await self._client.kill(WorkerStuck(NAME, self._client.process.pid, what, limit_s))

    def _gone(self, gone: asyncio.Future[Exception]) -> None:
        if not self._closed and self.on_end is not None:
            self.on_end(gone.result())  # of a future that is done


class ProcessTransport(Endpoint):
    """A transport in a `TransferProcess`, which makes it.

    Offers are checked here and kept there. The process learns of a withdrawal a moment later: a copy that is under way
    may read what the part holds by then, and ends "damaged", as the contract says.

    Attributes:
        name: of the transport in the process.
    """

    # not of the class: each stands for another transport
    name: str  # type: ignore[misc]  # an attribute for a property

    def __init__(self, process: TransferProcess, place: int, name: str) -> None:
        super().__init__()
        self.name = name
        self._process = process
        self._place = place
        self._opened = False

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._check_new()
        self._regions = regions
        self._offers.open(regions)
        self._opened = True
        try:
            self._source = await self._process.open(regions, self._place)
        except (PluginError, InvariantBroken, OSError):
            raise
        except FdasyncError as error:
            raise OSError(f"the transfer process cannot open its transports: {error}") from error

    def offer(self, parts: Sequence[Part]) -> None:
        super().offer(parts)
        if parts and not self._closed:
            self._process.tell(TransferService.offer, self._place, parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        super().withdraw(parts)
        if parts and not self._closed:
            self._process.tell(TransferService.withdraw, self._place, parts)

    def forget(self, source: Source) -> None:
        if not _is_sendable(source):
            return
        super().forget(source)
        self._process.tell(TransferService.forget, self._place, source)

    def _drop(self, token: bytes) -> None:
        # `forget` has told the process
        del token

    def _refusal(self, source: Source) -> Outcome | None:
        return None if _is_sendable(source) else refused("the source has fields out of their bounds")

    async def _copy(
        self, transfer: Transfer, source: Source, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]
    ) -> None:
        places = [place for place, outcome in enumerate(outcomes) if outcome is None]
        limit_s = max(transfer.deadline - transfer.now(), 0.0)
        call = self._process.receive(self._place, source, [copy_specs[each] for each in places], limit_s)
        call.add_done_callback(lambda _: transfer.wake())
        try:
            while not call.done() and not transfer.check():
                await transfer.wait(transfer.deadline)
            # at the deadline the process answers by itself, and some copies may be done
            await self._process.stop(call, answers=transfer.now() >= transfer.deadline)
            if call.cancelled():
                return
            found = call.result()  # of a task that is done
        except _ENDED as error:
            transfer.end(broken(str(error)))
            return
        except FdasyncError as error:
            transfer.end(CLOSED if self._closed else broken(str(error)))
            return
        finally:
            await self._process.stop(call)
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        self._transfers.end(CLOSED)
        try:
            await self._transfers.idle()
        finally:
            if self._opened:
                await self._process.aclose(self._place)
            self._regions = ()


def _is_sendable(source: Source) -> bool:
    """Whether the process can read this source: it comes from a peer, and the process ends at what it cannot read."""
    try:
        _SOURCE.decode(msgspec.msgpack.encode(source))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return False
    return True
