"""The receiver's side of the connection to one sender: asks for slots to be filled, and frees them.

It dials when it is made. When it ends, its requests fail with its outcome. Knows no engine and no memory. Made by
`transport.py`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast

from fdasync_fleet.transfer.tcp_wire import ANSWER_NBYTES, NONCE_NBYTES, check_answer, knock, parse_address, proof
from fdasync_fleet.transfer.validation import FORGOTTEN, broken

from fdasync.errors import ProtocolError
from fdasync.ipc.deadlines import Within
from fdasync_mooncake.transfer.staging import Slots
from fdasync_mooncake.transfer.wire import MAX_STAGES, TOLD, Free, Stage, Staged, Unstaged, WireRun, pack, unpack

if TYPE_CHECKING:
    from fdasync.cache.store.base import Outcome

#: requests that this side makes: the sender counts a request that is being freed as open for a moment longer
_REQUESTS = MAX_STAGES - 8


class ControlEnded(Exception):
    """The connection has ended, or the sender refused; `outcome` is that of the copies."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.problem)
        self.outcome = outcome


class Control(asyncio.Protocol):
    """See the module.

    Args:
        address, token: of the sender's source.
        keyed: it may be beyond the loopback.
        stuck_s: a sender that owes an answer for so long is given up.

    Attributes:
        ended: the outcome of its requests once it has ended.
        credits: shares its requests among receives.
        host: the sender's address, in numbers.
        moved_at: when it last heard something, or began to owe nothing.
    """

    def __init__(self, address: str, token: bytes, *, keyed: bool, stuck_s: float) -> None:
        """Raises ProtocolError for the address."""
        self.host, self._port = parse_address(address, keyed=keyed)
        self.ended: Outcome | None = None
        self.credits = Slots(range(_REQUESTS))
        self._loop = asyncio.get_running_loop()
        self.moved_at = self._loop.time()
        self._address = address
        self._token = token
        self._stuck_s = stuck_s
        self._nonce = os.urandom(NONCE_NBYTES)
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self._unread = bytearray()
        self._unsent = bytearray()
        self._number = 0
        self._answers: dict[int, asyncio.Future[Staged]] = {}
        self._dialling = self._loop.create_task(self._dial())

    @property
    def is_idle(self) -> bool:
        return not self._answers and self.credits.num_free == _REQUESTS

    # -- requests -------------------------------------------------------------------------------------

    def ask(self, runs: tuple[WireRun, ...]) -> tuple[int, asyncio.Future[Staged]]:
        """Ask for a slot with these runs; `free` its number in any case. The future may raise ControlEnded."""
        self._number += 1
        answer: asyncio.Future[Staged] = self._loop.create_future()
        if self.ended is not None:
            answer.set_exception(ControlEnded(self.ended))
            return self._number, answer
        if not self._answers:
            self.moved_at = self._loop.time()
        self._answers[self._number] = answer
        self._say(pack(Stage(self._number, runs)))
        return self._number, answer

    def free(self, number: int) -> None:
        """The slot is not wanted any more; idempotent."""
        self._answers.pop(number, None)
        if self.ended is None:
            self._say(pack(Free(number)))

    def check(self, now: float) -> None:
        """End it if the sender owes an answer for too long."""
        if self._answers and now - self.moved_at > self._stuck_s:
            what = "owes blocks and sent none" if self._greeted else "did not answer"
            self.drop(broken(f"{self._address} {what} for {self._stuck_s:g} s"))

    def drop(self, outcome: Outcome = FORGOTTEN) -> None:
        """End it; idempotent."""
        if self.ended is not None:
            return
        self.ended = outcome
        self._dialling.cancel()
        if self._transport is not None:
            self._transport.abort()
        for answer in self._answers.values():
            _fail(answer, outcome)
        self._answers.clear()

    # -- the connection -------------------------------------------------------------------------------

    async def _dial(self) -> None:
        try:
            async with Within(self._stuck_s):
                await self._loop.create_connection(lambda: self, self.host, self._port)
        except (OSError, TimeoutError) as error:
            why = str(error) or "no answer"
            self.drop(
                broken(
                    f"the sender says that its blocks are at {self._address}, and they cannot be reached there:"
                    f" {why}; it must listen (--listen) at an address that is reached from here"
                )
            )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by its class
        self._transport = cast("asyncio.Transport", transport)
        if self.ended is not None:
            self._transport.abort()
            return
        self._transport.write(knock(self._token, self._nonce))

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(broken(f"the connection to {self._address} broke: {error or 'the sender closed it'}"))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self.moved_at = self._loop.time()
        try:
            if not self._greeted:
                if len(self._unread) < ANSWER_NBYTES:
                    return
                theirs, _ = check_answer(bytes(self._unread[:ANSWER_NBYTES]), self._token, self._nonce)
                del self._unread[:ANSWER_NBYTES]
                self._greeted = True
                assert self._transport is not None
                self._transport.write(proof(self._token, self._nonce, theirs) + bytes(self._unsent))
                self._unsent.clear()
            while self.ended is None and (message := unpack(self._unread, TOLD)) is not None:
                self._on(message)
        except ProtocolError as error:
            self.drop(broken(f"the connection to {self._address} broke: {error}"))

    def _say(self, data: bytes) -> None:
        if not self._greeted:
            # the sender must show first that it knows the token
            self._unsent += data
        elif self._transport is not None:
            self._transport.write(data)

    def _on(self, message: Staged | Unstaged) -> None:
        answer = self._answers.pop(message.number, None)
        if answer is None or answer.done():
            # freed meanwhile
            return
        if isinstance(message, Unstaged):
            _fail(answer, broken(f"{self._address} cannot send: {message.problem}"))
        else:
            answer.set_result(message)


def _fail(answer: asyncio.Future[Staged], outcome: Outcome) -> None:
    if not answer.done():
        answer.set_exception(ControlEnded(outcome))
        # retrieved, so that asyncio does not warn of an answer that nobody reads
        answer.exception()
