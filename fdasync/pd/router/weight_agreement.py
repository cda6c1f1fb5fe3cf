"""Which weights a router's instances must have, and what becomes of one that has others (DECISIONS 22).

All instances of a router have one weights id. One that comes up with another gets no requests: it is brought up to
date with this router's last update, by the same command, or it is dropped by name. Where there was no update, those
that were there at the start are the measure: of several, those of the latest version; one of an earlier version waits
for whoever updates the others. Instances that change while they are there were updated by somebody else: they are
followed as soon as most have changed.

Nobody is followed to an earlier version than the fleet has, or had before it died: what serves version 5 must not go on
with the checkpoint's weights because all that had others were started again. Such instances wait for whoever updates
them, and requests that find nobody else end saying so.

Told by `router/router.py` and `control.py`; sends nothing but that one command.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import FdasyncError, PeerBusy
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.pd.messages import Command, Done
    from fdasync.pd.router.instances import Fleet, Member

_AGAIN_S = 0.5
_OTHER = "it has other weights than the instances that were there before it"
#: why one gets no requests, if it will in a moment
BEHIND = "it has other weights than the others, and gets no requests until it has theirs"


class Dropped(msgspec.Struct, frozen=True):
    """An instance that a router does not use any more, and why."""

    address: str
    problem: str


class Agreement:
    """See the module.

    Args:
        tell: has an instance do something, within so many seconds; its answer, whatever it is. Raises PeerUnreachable,
            PeerBusy, DeadlineExceeded.
        forget: an instance is not used any more.
        fail: something went wrong that must not.
        limit_s: how long an instance may take to be brought up to date.

    Attributes:
        dropped: all so far.
        last: this router's last update, as long as nobody else made a later one.
        held: an update is under way, or the router starts; who comes up is judged at its end.
    """

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[Member, Command, float], Awaitable[Done]],
        forget: Callable[[Member], None],
        fail: Callable[[Exception], None],
        limit_s: float,
    ) -> None:
        self.dropped: list[Dropped] = []
        self.last: Command | None = None
        self.held = True
        self._fleet = fleet
        self._tell = tell
        self._forget = forget
        self._fail = fail
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._followed = False
        self._tasks: dict[Member, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """The first are there. One that was started again a moment ago may be among them, with weights of before: it is
        no measure for those that have been updated."""
        up = self._fleet.up()
        have = Counter(member.namespace for member in up)
        if up:
            best = max(up, key=lambda member: (member.weight_version, have[member.namespace]))
            self._serve(best)
        self.held = False
        self.judge_all()

    def judge(self, member: Member) -> None:
        """It came up, or said that its weights changed."""
        if member in self._tasks:
            # its answer to the command decides
            return
        member.behind, member.waits = member.namespace != self._fleet.namespace, ""
        if not member.behind:
            member.changed = False
            self._fleet.weight_version = max(self._fleet.weight_version, member.weight_version)
            return
        if self.held:
            return
        if member.changed:
            self._follow(member)
        elif self.last is not None:
            self._spawn(member, self.last)
        elif self._is_earlier(member):
            self._let_wait(member)
        elif not any(other.namespace == self._fleet.namespace for other in self._fleet.up()):
            # nobody is there to differ from
            self._serve(member)
            member.behind = False
        elif not self._followed:
            self.drop(member, _OTHER)
        else:
            # whoever updates the others is expected to update this one
            member.waits = BEHIND

    def _serve(self, member: Member) -> None:
        """All are to have what this one has."""
        self._fleet.namespace, self._fleet.weight_version = member.namespace, member.weight_version

    def _is_earlier(self, member: Member) -> bool:
        """It has an earlier version than the fleet has or had: started again since, most likely."""
        return member.weight_version < self._fleet.weight_version

    def _let_wait(self, member: Member) -> None:
        member.waits = (
            f"it has other weights than the fleet, of version {member.weight_version}, which is earlier than version"
            f" {self._fleet.weight_version}: it gets no requests until somebody updates it"
        )

    def judge_all(self) -> None:
        """An update is over, or the start."""
        for member in self._fleet.up():
            self.judge(member)

    def agreed(self, words: Command, namespace: bytes) -> None:
        """An update of this router went well."""
        self.last, self._followed = words, False
        self._fleet.namespace, self._fleet.weight_version = namespace, words.version

    def drop(self, member: Member, problem: str) -> None:
        """It is not used any more; its link is hung up in the next turn of the loop."""
        if member.dropped:
            return
        member.behind, member.dropped = True, problem
        self.dropped.append(Dropped(member.address, problem))
        self._loop.call_soon(self._forget, member)

    def _follow(self, member: Member) -> None:
        """Somebody else gives instances other weights, one after the other."""
        if self._is_earlier(member):
            self._let_wait(member)
            return
        up = self._fleet.up()
        have = [other.namespace for other in up]
        if self._fleet.namespace in have and 2 * have.count(member.namespace) <= len(have):
            return
        self._serve(member)
        # it is older than what they have now
        self.last, self._followed = None, True
        for other in up:
            other.behind = other.namespace != member.namespace
            other.changed = other.changed and other.behind
            other.waits = other.waits if other.behind else ""

    # -- bringing one up to date ----------------------------------------------------------------------

    async def quiet(self, limit_s: float, member: Member | None = None) -> None:
        """Until nobody, or not this one, is being brought up to date."""
        tasks = [task for other, task in self._tasks.items() if member in (None, other)]
        if tasks:
            await wait_within(tasks, limit_s)

    async def aclose(self) -> None:
        """Nobody is brought up to date any more; who was told to be goes on."""
        self.held = True
        for task in list(self._tasks.values()):
            task.cancel()
        await self.quiet(1.0)

    def _spawn(self, member: Member, words: Command) -> None:
        task = self._loop.create_task(self._bring(member, words, member.sessions), name="fdasync-weights")
        self._tasks[member] = task

        def ended(_: object) -> None:
            del self._tasks[member]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._fail(error)
            elif member.peer.is_up and member.behind and not member.dropped:
                # it was lost meanwhile, and is back
                self.judge(member)

        task.add_done_callback(ended)

    async def _bring(self, member: Member, words: Command, session: int) -> None:
        until = self._loop.time() + self._limit_s
        # what it was to get may be old by now: another router's update came between
        while self.last is words and member.namespace != self._fleet.namespace:
            left_s = max(until - self._loop.time(), 0.0)
            done, problem = None, ""
            try:
                done = await self._tell(member, words, left_s)
            except PeerBusy as error:
                problem = str(error)
            except FdasyncError as error:
                problem, left_s = str(error), 0.0
            if member.sessions != session or not member.peer.is_up:
                # judged anew when it comes up
                return
            if done is not None:
                if done.namespace == self._fleet.namespace and done.error in ("", "BadInput"):
                    # the version may be one that it had used, if it took it and its answer was lost
                    member.has(done.namespace, done.weight_version)
                    return
                problem = f"{done.error}: {done.problem}" if done.error else f"{words.path} is not what it was"
            if left_s < _AGAIN_S or (done is not None and done.error != "UpdateUnderWay"):
                self.drop(member, f"it has other weights, and did not come to version {words.version}: {problem}")
                return
            await asyncio.sleep(_AGAIN_S)
