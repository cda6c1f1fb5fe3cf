"""What a router has all its instances do: weight updates, pauses, drains. One command, one answer of each instance.

A weight update is a barrier (DECISIONS 22): hold intake, let hand-overs finish, update all under one weights id, drop
by name who fails, open. Called by `router.py`; knows no requests but that some are being handed over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import errors
from fdasync.errors import BadInput, DeadlineExceeded, FdasyncError, PeerUnreachable, RemoteError
from fdasync.pd.checks import check_limit_s, check_whole
from fdasync.pd.messages import Command, Done

if TYPE_CHECKING:
    from fdasync.pd.fleet import Member
    from fdasync.pd.link import Links
    from fdasync.pd.router import Router

_LOOK_S = 0.02


class Dropped(msgspec.Struct, frozen=True):
    """An instance that a router does not use any more, and why."""

    address: str
    problem: str


class Commands:
    """See the module.

    Attributes:
        dropped: instances that failed a weight update.
    """

    def __init__(self, router: Router, links: Links) -> None:
        self._router = router
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._waiting: dict[int, tuple[Member, asyncio.Future[Done]]] = {}
        self._held: asyncio.Future[None] | None = None
        self._used: set[int] = set()
        self.dropped: list[Dropped] = []

    async def wait_open(self, limit_s: float) -> None:
        """Until intake is open. Raises DeadlineExceeded."""
        while self._held is not None:
            done, _ = await asyncio.wait([self._held], timeout=limit_s)
            if not done:
                raise DeadlineExceeded("waiting for a weight update to end", limit_s)

    # -- one instance -------------------------------------------------------------------------------

    async def one(self, member: Member, words: Command, limit_s: float) -> Done:
        """Raises PeerUnreachable, DeadlineExceeded, and what it answered: RemoteError, or an error of its kind."""
        answer: asyncio.Future[Done] = self._loop.create_future()
        number = self._next
        self._next += 1
        self._waiting[number] = member, answer
        try:
            member.peer.send(msgspec.structs.replace(words, number=number))
            await asyncio.wait([answer], timeout=limit_s)
        finally:
            del self._waiting[number]
        if not answer.done():
            raise DeadlineExceeded(f"{words.verb} of {member.peer.name}", limit_s)
        done = answer.result()  # of a future that is done
        if done.error:
            raise _error_of(member, done)
        return done

    def on_done(self, member: Member, message: Done) -> None:
        entry = self._waiting.get(message.number)
        if entry is not None and entry[0] is member and not entry[1].done():
            entry[1].set_result(message)

    def on_lost(self, member: Member, error: PeerUnreachable) -> None:
        for other, answer in self._waiting.values():
            if other is member and not answer.done():
                answer.set_exception(error)

    async def drain(self, member: Member, limit_s: float) -> None:
        check_limit_s(limit_s)
        words = Command(0, "drain", limit_s=float(limit_s))
        check_whole("drain", words)
        member.leaving = True
        await self.one(member, words, limit_s + 1.0)

    # -- all instances ------------------------------------------------------------------------------

    async def all(self, verb: Any) -> None:
        """Raises the first error, after all have answered."""
        limit_s = self._router.config.command_s
        _, failed = await self._tell_all(Command(0, verb), limit_s)
        if failed:
            raise failed[0][1]

    async def _tell_all(
        self, words: Command, limit_s: float
    ) -> tuple[list[tuple[Member, Done]], list[tuple[Member, FdasyncError]]]:
        members = self._router.fleet.up()
        outcomes = await asyncio.gather(
            *[self.one(member, words, limit_s) for member in members], return_exceptions=True
        )
        done: list[tuple[Member, Done]] = []
        failed: list[tuple[Member, FdasyncError]] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Done):
                done.append((member, outcome))
            elif isinstance(outcome, FdasyncError):
                failed.append((member, outcome))
            else:
                raise outcome
        return done, failed

    async def update_weights(self, version: Any, path: str, mode: Any) -> None:
        if self._held is not None:
            raise BadInput("update_weights", "another update is under way", hint="wait for its end")
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 47:
            raise BadInput("version", f"{version!r} is no version", limit="an integer from 0 on")
        if mode not in ("abort", "keep"):
            raise BadInput("mode", f"{mode!r} is neither 'abort' nor 'keep'")
        if version in self._used:
            raise BadInput("version", f"{version} was used before", hint="a version is never used twice")
        words = Command(0, "update_weights", version=version, path=path, mode=mode)
        check_whole("source", words)
        self._held = self._loop.create_future()
        try:
            await self._let_hand_overs_finish()
            done, failed = await self._tell_all(words, self._router.config.command_s)
            if not done:
                raise failed[0][1] if failed else PeerUnreachable("router", "no instance is there")
            self._used.add(version)
            self._agree(done, failed)
        finally:
            held, self._held = self._held, None
            held.set_result(None)

    async def _let_hand_overs_finish(self) -> None:
        router = self._router
        until = self._loop.time() + router.config.handoff_s
        while router.dispatch.being_handed_over() and self._loop.time() < until:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(_LOOK_S)
        for request in router.dispatch.being_handed_over():
            router.dispatch.restart(request)

    def _agree(self, done: list[tuple[Member, Done]], failed: list[tuple[Member, FdasyncError]]) -> None:
        """Whoever has not what most have is not used any more."""
        (namespace, _), *_ = Counter([answer.namespace for _, answer in done]).most_common(1)
        for member, answer in done:
            if answer.namespace == namespace:
                member.namespace = namespace
                member.weight_version = answer.weight_version
                member.blocks.clear()
            else:
                self._drop(member, "its weights are not those of the others after the update")
        for member, error in failed:
            self._drop(member, str(error))

    def _drop(self, member: Member, problem: str) -> None:
        self.dropped.append(Dropped(member.address, problem))
        self._router.remove(member.address)


def _error_of(member: Member, done: Done) -> FdasyncError:
    kind = getattr(errors, done.error, None)
    if done.error in ("WeightsRejected", "WeightsBroken") and kind is not None:
        error: FdasyncError = kind(f"{member.peer.name}: {done.problem}")
        return error
    return RemoteError(member.peer.name, done.error, done.problem)
