"""What a router has all its instances do: weight updates, pauses, drains. One command, one answer of each instance.

A weight update is a barrier (DECISIONS 22): hold intake, let hand-overs finish, update all under one weights id, drop
by name who fails, open. It is a task of the router: a caller that is cancelled stops waiting, the update goes on to its
end, and then every instance has the new weights, is being brought to them (`weight_agreement.py`), or is dropped.
Called by `router/router.py`; knows no requests but that some are being handed over."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import errors
from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    PeerUnreachable,
    RemoteError,
    UpdateUnderWay,
)
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.pd.messages import Command, Done
from fdasync.pd.router.validation import check_limit_s, check_whole
from fdasync.pd.router.weight_agreement import Agreement

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.pd.link.links import Links
    from fdasync.pd.router.config import RouterConfig
    from fdasync.pd.router.dispatch import Dispatch
    from fdasync.pd.router.instances import Fleet, Member
    from fdasync.pd.router.weight_agreement import Dropped

_LOOK_S = 0.02


class Update(msgspec.Struct, frozen=True):
    """A weight update that is under way, or whose end nobody has been told."""

    words: Command
    task: asyncio.Task[None]


class Commands:
    """See the module.

    Attributes:
        agreement: which weights all are to have.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatch: Dispatch,
        links: Links,
        config: RouterConfig,
        remove: Callable[[str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`remove`: told of the address of an instance that is not used any more."""
        self._fleet = fleet
        self._dispatch = dispatch
        self._links = links
        self._config = config
        self._remove = remove
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._waiting: dict[int, tuple[Member, asyncio.Future[Done]]] = {}
        self._used: set[int] = set()
        # updates that somebody may have taken without our hearing of it
        self._unsure: list[Command] = []
        self._update: Update | None = None
        self._closed = False
        self.agreement = Agreement(fleet, self._ask, self._forget, on_failure, config.command_s)

    @property
    def dropped(self) -> list[Dropped]:
        """Instances that are not used any more, and why."""
        return self.agreement.dropped

    # -- one instance -------------------------------------------------------------------------------

    async def one(self, member: Member, words: Command, limit_s: float) -> Done:
        """Raises PeerUnreachable, PeerBusy, DeadlineExceeded, and what it answered: RemoteError, or an error of its
        kind."""
        done = await self._ask(member, words, limit_s)
        if done.error:
            raise _error_of(member, done)
        return done

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _ask(self, member: Member, words: Command, limit_s: float) -> Done:
        """Its answer, whatever it is."""
        answer: asyncio.Future[Done] = self._loop.create_future()
        number = self._number()
        self._waiting[number] = member, answer
        try:
            member.peer.send(msgspec.structs.replace(words, number=number))
            await wait_within([answer], limit_s)
        finally:
            del self._waiting[number]
        if not answer.done():
            raise DeadlineExceeded(f"{words.verb} of {member.peer.name}", limit_s)
        return answer.result()  # of a future that is done

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
        answers, silent = await self._ask_all(Command(0, verb), self._config.command_s)
        failed = [_error_of(member, done) for member, done in answers if done.error] + [error for _, error in silent]
        if failed:
            raise failed[0]

    async def _ask_all(
        self, words: Command, limit_s: float
    ) -> tuple[list[tuple[Member, Done]], list[tuple[Member, FdasyncError]]]:
        """What those who are there answered, and why others did not."""
        members = self._fleet.up()
        outcomes = await asyncio.gather(
            *[self._ask(member, words, limit_s) for member in members], return_exceptions=True
        )
        answers: list[tuple[Member, Done]] = []
        silent: list[tuple[Member, FdasyncError]] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Done):
                answers.append((member, outcome))
            elif isinstance(outcome, FdasyncError):
                silent.append((member, outcome))
            else:
                raise outcome
        return answers, silent

    async def update_weights(self, version: Any, path: str, mode: Any) -> None:
        """It goes on to its end if its caller is cancelled; who gives the same again is told that end."""
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 47:
            raise BadInput("version", f"{version!r} is no version", limit="an integer from 0 on")
        if mode not in ("abort", "keep"):
            raise BadInput("mode", f"{mode!r} is neither 'abort' nor 'keep'")
        words = Command(0, "update_weights", version=version, path=path, mode=mode)
        check_whole("source", words)
        update = self._update
        if update is None or update.words != words:
            if update is not None and not update.task.done():
                raise UpdateUnderWay(f"of this router, to version {update.words.version}")
            if version in self._used:
                raise BadInput("version", f"{version} was used before", hint="a version is never used twice")
            update = self._update = self._begin(words)
        # bounded by the limits of what it waits for
        await asyncio.wait([update.task])
        if self._update is update:
            self._update = None
        if update.task.cancelled():
            raise EngineClosed("closed")
        update.task.result()  # of a task that is done

    def _begin(self, words: Command) -> Update:
        self._dispatch.hold()
        self.agreement.held = True
        task = self._loop.create_task(self._play(words), name="fdasync-weights")
        task.add_done_callback(self._ended)
        return Update(words, task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # its error is the caller's; one who was cancelled may never ask
        _ = task.cancelled() or task.exception()
        self.agreement.held = False
        self.agreement.judge_all()
        self._dispatch.release()

    async def _play(self, words: Command) -> None:
        await self.agreement.quiet(self._config.command_s)
        await self._claim_all()
        await self._let_hand_overs_finish()
        answers, silent = await self._ask_all(words, self._config.command_s)
        took = [(member, done) for member, done in answers if self._took(done, words)]
        refused = [(member, _error_of(member, done)) for member, done in answers if not self._took(done, words)]
        if silent:
            self._unsure.append(words)
        if not took:
            errors = [error for _, error in refused + silent]
            raise errors[0] if errors else PeerUnreachable("router", "no instance is there")
        self._used.add(words.version)
        self._agree(words, took)
        for member, error in refused + silent:
            if not isinstance(error, UpdateUnderWay):
                self.agreement.drop(member, str(error))

    def _took(self, done: Done, words: Command) -> bool:
        """Also where it took the version when it was told before, and its answer did not come."""
        before = done.error == "BadInput" and done.weight_version == words.version and words in self._unsure
        return not done.error or before

    async def _claim_all(self) -> None:
        """No other router updates any of them meanwhile; all ask in the same order, so that one of two gets them all.
        Raises UpdateUnderWay, and then has claimed none."""
        config = self._config
        words = Command(0, "claim", limit_s=config.handoff_s + 2 * config.command_s)
        claimed: list[Member] = []
        for member in sorted(self._fleet.up(), key=lambda member: member.address):
            try:
                await self.one(member, words, config.command_s)
            except UpdateUnderWay:
                for other in claimed:
                    with contextlib.suppress(FdasyncError):
                        other.peer.send(Command(self._number(), "release"))
                raise
            except FdasyncError:
                # it is gone, or will not take the update either
                continue
            claimed.append(member)

    async def _let_hand_overs_finish(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with Within(self._config.handoff_s):
                while self._dispatch.being_handed_over():  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(_LOOK_S)
        for request in self._dispatch.being_handed_over():
            self._dispatch.restart(request)

    def _agree(self, words: Command, took: list[tuple[Member, Done]]) -> None:
        """Whoever has not what most have is not used any more."""
        (namespace, _), *_ = Counter([done.namespace for _, done in took]).most_common(1)
        self.agreement.agreed(words, namespace)
        for member, done in took:
            if done.namespace == namespace:
                member.has(namespace, done.weight_version)
            else:
                self.agreement.drop(member, "its weights are not those of the others after the update")

    def _forget(self, member: Member) -> None:
        if self._fleet.members.get(member.peer) is member and not self._closed:
            self._remove(member.address)

    async def aclose(self) -> None:
        """Stop what is under way; instances go on with what they were told."""
        self._closed = True
        if self._update is not None and not self._update.task.done():
            self._update.task.cancel()
            await wait_within([self._update.task], 1.0)
        await self.agreement.aclose()


def _error_of(member: Member, done: Done) -> FdasyncError:
    kind = getattr(errors, done.error, None)
    if done.error == "UpdateUnderWay":
        return UpdateUnderWay(f"says {member.peer.name}")
    if done.error in ("WeightsRejected", "WeightsBroken") and kind is not None:
        error: FdasyncError = kind(f"{member.peer.name}: {done.problem}")
        return error
    return RemoteError(member.peer.name, done.error, done.problem)
