"""Decides which weights a router's instances must have, and handles an instance that has others (docs/design.md, rule
22).

All instances of a router must have one weights id. An instance with another one gets no requests. If this router has
made an update, it brings the instance to that update's weights by the same command, or drops it by name; an instance
that refuses while no other of its role serves is kept, and waits for the next update. If this router has made none, the
instances that were up at the start set the weights id: of several ids, the latest version's. An instance of an earlier
version then waits for the router that updates the others. Which version is earlier is told by its order, a number
beside the label (`request.next_order`), and not by the label.

An update may be a delta to the weights before. The router remembers the updates from the last whole folder on, at most
`MOST_DELTAS` of them deltas, and brings an instance to each that it lacks, in their order. Weights that a trainer's
process group brought, and weights beyond so many deltas, cannot be had again: an instance that comes up later waits for
the next update.

An instance that sleeps has no memory for weights. It is not dropped: it is brought to the weights that it lacks once
its memory is back (`woke`). An instance that dropped its weights in a sleep, and could not load them again, is brought
all of them. Where they cannot be had again it waits for the next update, which mends it.

Instances with the same weights may have different labels: an instance started again from the updated folder has
another. Such an instance gets the label that this router gave last.

Another router may update instances while they are up. This router then adopts their weights as soon as most of them
have changed. It never goes back to an earlier version: a fleet that served version 5 must not go on with the
checkpoint's weights because all of its instances were started again. Such instances wait for an update, and a request
that finds no other instance fails with that reason.

Knows no requests, and sends no command but that update. Called by `router/router.py` and `router/control.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import FdasyncError, PeerBusy
from fdasync.ipc.deadlines import wait_within
from fdasync_fleet.router.instances import MISSED, OUT
from fdasync_fleet.verbs import Verbs, error_of, folder_of, name_of, verb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync_fleet.messages import Reply
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable

#: deltas that an instance is brought to one after the other
MOST_DELTAS = 64
_AGAIN_S = 0.5
_OTHER = "it has other weights than the instances that were there before it"
#: why an instance gets no requests while it is brought up to date
BEHIND = "it has other weights than the others, and gets no requests until it has theirs"
_ASLEEP = "it slept while the others got other weights, and gets no requests until it is awake and has theirs"


class Dropped(msgspec.Struct, frozen=True):
    """An instance that a router has stopped using.

    Attributes:
        address: its address.
        problem: the reason, for people.
    """

    address: str
    problem: str


class _Update(msgspec.Struct, frozen=True):
    """An update of this router.

    Attributes:
        command: with its order.
        base: namespace of the weights before, where it is a delta to them; b"" where it is whole.
        namespace: of the weights after it.
    """

    command: Any
    base: bytes
    namespace: bytes


class WeightAgreement:
    """See the module.

    Args:
        tell: sends a command to an instance and returns its reply, within so many seconds. Raises PeerUnreachable,
            PeerBusy, DeadlineExceeded.
        forget: called with an instance that the router stops using.
        fail: called with an error that is a defect.
        limit_s: how long an instance may take to be brought up to date.

    Attributes:
        dropped: all instances dropped so far.
        last: the latest label, with its order, of this router's updates and labels; None before the first, and after
            another router's later update.
        held: an update is under way, or the router starts; instances that come up are judged at its end.
    """

    def __init__(
        self,
        table: InstanceTable,
        tell: Callable[[InstanceHandle, Any, float], Awaitable[Reply]],
        forget: Callable[[InstanceHandle], None],
        fail: Callable[[Exception], None],
        limit_s: float,
    ) -> None:
        self.dropped: list[Dropped] = []
        self.last: tuple[str, int] | None = None
        self.held = True
        self._table = table
        self._tell = tell
        self._forget = forget
        self._fail = fail
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._followed = False
        # from the last whole folder on, where they can be had again; or from the weights before, all of them deltas
        self._updates: tuple[_Update, ...] = ()
        self._tasks: dict[InstanceHandle, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """The first instances are up. The latest version counts: an instance that was started again a moment ago may
        have older weights than the others."""
        up = self._table.up()
        have = Counter(instance.namespace for instance in up)
        if up:
            best = max(up, key=lambda instance: (instance.weight_order, have[instance.namespace]))
            self._serve(best)
        self.held = False
        self.judge_all()

    def judge(self, instance: InstanceHandle) -> None:
        """An instance came up, or its weights changed: decide whether it gets requests."""
        if instance in self._tasks:
            # its reply to the command decides
            return
        if instance.namespace == self._table.namespace:
            instance.stands("alike")
            self._compare_labels(instance)
            return
        # what somebody else brings is followed to later weights only
        if instance.standing not in MISSED and (instance.standing != "moved" or self._is_earlier(instance)):
            instance.stands("behind")
        if self.held:
            return
        if instance.standing == "moved":
            self._follow(instance)
        elif (updates := self.lacking(instance.namespace)) is not None:
            if instance.standing == "asleep":
                instance.stands("asleep", _ASLEEP)
            else:
                self._spawn(instance, updates)
        elif self._is_earlier(instance):
            self._let_wait(instance)
        elif not any(other.namespace == self._table.namespace for other in self._table.up()):
            # no instance is up with the weights that all must have
            self._serve(instance)
            instance.stands("alike")
        elif not self._followed:
            self.drop(instance, _OTHER)
        else:
            # the router that updates the others is expected to update this one
            self._let_wait(instance, BEHIND)

    def keep(self, instance: InstanceHandle, *, sleeps: bool) -> None:
        """It has refused weights that others took, for it sleeps, or has none that a delta could be applied to; or a
        sleep dropped its own."""
        instance.stands("asleep" if sleeps else "late")

    def woke(self, instance: InstanceHandle, *, lacks_all: bool) -> None:
        """It may have memory for weights again: bring it the weights that it lacks. `lacks_all`: a sleep dropped its
        weights, and it did not load them again."""
        if instance in self._tasks:
            return
        goes_on = instance.said in ("running", "paused") and instance.namespace == self._table.namespace
        if lacks_all and not instance.behind:
            if self._whole and not self.held:
                self.keep(instance, sleeps=False)
                self._spawn(instance, self._whole)
        elif instance.standing == "asleep" or (instance.standing == "late" and goes_on):
            instance.stands("late")
            self.judge(instance)

    def _compare_labels(self, instance: InstanceHandle) -> None:
        """An instance has the right weights: adopt its label if that is later, or give it this router's."""
        table = self._table
        if instance.weight_order > table.weight_order:
            table.weight_version, table.weight_order = instance.weight_version, instance.weight_order
            if self.last is not None:
                self._relabel(table.weight_version, table.weight_order)
        elif self.last is not None and not self.held and not self._has_label(instance):
            self._spawn(instance, (_Update(verb(Verbs.relabel, *self.last), b"", table.namespace),))

    def _has_label(self, instance: InstanceHandle) -> bool:
        """Whether its label is the agreed one, or no earlier one."""
        table = self._table
        return instance.weight_version == table.weight_version or instance.weight_order >= table.weight_order

    def _serve(self, instance: InstanceHandle) -> None:
        """All instances must have the weights of this one."""
        self._table.namespace = instance.namespace
        self._table.weight_version, self._table.weight_order = instance.weight_version, instance.weight_order

    def _is_earlier(self, instance: InstanceHandle) -> bool:
        """It has an earlier version than the others have or had; most likely it was started again since."""
        return instance.weight_order < self._table.weight_order

    def _let_wait(self, instance: InstanceHandle, why: str = "") -> None:
        why = why or (
            f"it has other weights than the others, of version {instance.weight_version}, which is earlier than version"
            f" {self._table.weight_version}: it gets no requests until it is updated"
        )
        instance.stands(instance.standing if instance.standing in MISSED else "waits", why)

    def judge_all(self) -> None:
        """The start or an update is over: judge all instances."""
        for instance in self._table.up():
            self.judge(instance)

    def agreed(self, command: Any, namespace: bytes, *, is_delta: bool) -> None:
        """An update of this router, or of the label alone, succeeded. `is_delta`: to the weights before."""
        is_label = name_of(command) == "relabel"
        if not is_label and not (is_delta and namespace == self._table.namespace):
            # not the version in use, given again
            before = self._updates if is_delta else ()
            base = self._table.namespace if is_delta else b""
            # tensors of a group come once
            comes_again = folder_of(command) and len(before) <= MOST_DELTAS
            self._updates = (*before, _Update(command, base, namespace)) if comes_again else ()
        self._relabel(command.version, command.order)
        # after a new label alone the router that updates the others is still another one
        self._followed = self._followed and is_label
        self._table.namespace = namespace
        self._table.weight_version, self._table.weight_order = command.version, command.order

    def _relabel(self, version: str, order: int) -> None:
        self.last = version, order
        if self._updates:
            *before, latest = self._updates
            command = msgspec.structs.replace(latest.command, version=version, order=order)
            self._updates = (*before, msgspec.structs.replace(latest, command=command))

    def lacking(self, namespace: bytes) -> tuple[_Update, ...] | None:
        """The updates that bring an instance from these weights to the others' weights; None: no update can."""
        for number in reversed(range(len(self._updates))):
            if self._updates[number].base == namespace:
                return self._updates[number:]
        return self._whole or None

    @property
    def _whole(self) -> tuple[_Update, ...]:
        """The updates that bring an instance from any weights to the others' weights; (): no update can."""
        return self._updates if self._updates and not self._updates[0].base else ()

    def drop(self, instance: InstanceHandle, problem: str) -> None:
        """Stop using an instance; its link is hung up in the next turn of the loop."""
        if instance.standing == "dropped":
            return
        instance.stands("dropped", problem)
        self.dropped.append(Dropped(instance.address, problem))
        self._loop.call_soon(self._forget, instance)

    def _follow(self, instance: InstanceHandle) -> None:
        """Another router updates the instances one after the other: adopt its weights once most have them."""
        up = self._table.up()
        have = [other.namespace for other in up]
        if self._table.namespace in have and 2 * have.count(instance.namespace) <= len(have):
            return
        self._serve(instance)
        # this router's last update is older than the adopted weights
        self.last, self._updates, self._followed = None, (), True
        for other in up:
            if other.namespace == instance.namespace:
                other.stands("alike")
            elif not other.behind:
                other.stands("behind")

    # -- bringing an instance up to date --------------------------------------------------------------

    async def quiet(self, limit_s: float, instance: InstanceHandle | None = None) -> None:
        """Wait until no instance, or not this one, is being brought up to date."""
        tasks = [task for other, task in self._tasks.items() if instance in (None, other)]
        if tasks:
            await wait_within(tasks, limit_s)

    async def aclose(self) -> None:
        """Stop bringing instances up to date; an instance finishes the update that it has begun."""
        self.held = True
        for task in list(self._tasks.values()):
            task.cancel()
        await self.quiet(1.0)

    def _spawn(self, instance: InstanceHandle, updates: tuple[_Update, ...]) -> None:
        instance.stands("catching_up" if instance.standing in MISSED else "bringing")
        ours = {instance.namespace, *[update.namespace for update in updates]}
        task = self._loop.create_task(self._bring(instance, updates), name="fdasync-weights")
        self._tasks[instance] = task

        def ended(_: object) -> None:
            del self._tasks[instance]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._fail(error)
            elif instance.peer.is_up and not self.held and instance.standing not in ("asleep", "dropped", *OUT):
                # it was lost and came back meanwhile, or has told of other weights
                if instance.namespace not in ours:
                    instance.stands("moved")
                self.judge(instance)

        task.add_done_callback(ended)

    async def _bring(self, instance: InstanceHandle, updates: tuple[_Update, ...]) -> None:
        until, session = self._loop.time() + self._limit_s, instance.sessions
        whole = self._whole
        # an instance that has dropped its weights in a sleep takes no delta to them
        ways = (updates, whole) if whole and len(whole) > len(updates) else (updates,)
        for way in ways:
            for update in way:
                came = await self._bring_to(instance, update, session, until, may_fail=way is not ways[-1])
                if not came:
                    break
            if came is not None:
                return

    async def _bring_to(
        self, instance: InstanceHandle, update: _Update, session: int, until: float, *, may_fail: bool
    ) -> bool | None:
        """Whether it came to this update, and may go on to the next. None: it refused, which it may."""
        command, last = update.command, self.last
        # a later update of this or another router ends the loop
        while self.last == last and not self._has_all(instance):
            left_s = max(until - self._loop.time(), 0.0)
            reply, problem = None, ""
            try:
                reply = await self._tell(instance, command, left_s)
            except PeerBusy as error:
                problem = str(error)
            except FdasyncError as error:
                problem, left_s = str(error), 0.0
            if instance.sessions != session or not instance.peer.is_up:
                # `judge` sees it when it comes up
                return False
            if reply is not None:
                has, failure = reply.standing, reply.failure
                instance.was_told(has.state)
                if has.namespace == update.namespace and failure is None:
                    if has.namespace == self._table.namespace:
                        instance.has(has.namespace, has.weight_version, has.weight_order)
                    else:
                        instance.came_to(has.namespace)
                    return True
                if reply.error == "Asleep":
                    instance.stands("asleep", _ASLEEP)
                    return False
                if reply.error == "WeightsRejected" and may_fail:
                    return None
                is_other = f"{folder_of(command)} is not what it was"
                problem = is_other if failure is None else str(error_of(instance.peer.name, failure))
            if left_s < _AGAIN_S or (reply is not None and reply.error != "UpdateUnderWay"):
                problem = f"it has other weights, and did not come to version {command.version}: {problem}"
                kept = instance.standing == "catching_up"
                if kept or (reply is not None and reply.error and not self._has_like(instance)):
                    # a trainer may have deleted the folder; without this instance no later update would help
                    instance.stands("late" if kept else "waits", f"{problem}; it gets no requests until it is updated")
                else:
                    self.drop(instance, problem)
                return False
            await asyncio.sleep(_AGAIN_S)
        return False

    def _has_all(self, instance: InstanceHandle) -> bool:
        """Whether it has the weights of the others, whole, under their label."""
        is_whole = instance.doing not in ("waits_for_weights", "broken")
        return instance.namespace == self._table.namespace and self._has_label(instance) and is_whole

    def _has_like(self, instance: InstanceHandle) -> bool:
        """Whether an instance of the same role takes work."""
        return any(other.takes_work and other.hello.role == instance.hello.role for other in self._table.up())
