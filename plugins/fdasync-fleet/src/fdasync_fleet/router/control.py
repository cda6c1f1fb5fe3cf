"""Sends a router's commands to its instances: weight updates, pauses, drains. Each instance replies once to a command.

A weight update, or a new label for the weights in use, is a barrier (docs/design.md, rule 22): the router holds new
requests, lets hand-offs finish (before an update), updates all instances under one weights id, drops by name the
instances that fail, and goes on. It is a task of the router: if its caller is cancelled, it still runs to its end. Then
each instance has the new weights, is being brought to them or sleeps (`router/weights/agreement.py`), or is dropped.

One change of all instances is under way at a time: an update, a join or leave of a trainer's group, a sleep, a wake.
Otherwise one instance would take two of them in one order, and the next instance in the other. Claims on the instances
see to it where another router makes the other change.

Knows nothing of requests but which are being handed over. Called by `router/router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync.errors import (
    Asleep,
    BadInput,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    PeerUnreachable,
    UpdateUnderWay,
    WeightsDiffer,
    WeightsRejected,
)
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.ipc.futures import fail
from fdasync.request import (
    FIRST_VERSION,
    GroupTensors,
    WeightsGroup,
    check_update_mode,
    checked_fingerprint,
    checked_sleep,
    checked_tags,
    checked_version,
    next_order,
    next_version,
)
from fdasync_fleet.fields import MOST_S
from fdasync_fleet.messages import Call, Reply
from fdasync_fleet.router.validation import check_limit_s, check_whole
from fdasync_fleet.router.weights.agreement import WeightAgreement
from fdasync_fleet.router.weights.part_update import PartUpdate
from fdasync_fleet.router.weights.wakes import Wakes
from fdasync_fleet.verbs import Verbs, error_of, folder_of, name_of, verb

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from fdasync.request import Doing, PauseMode, SleepMode, WakeTag
    from fdasync_fleet.link.links import Links
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.router.dispatch import Dispatch
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable
    from fdasync_fleet.router.weights.agreement import Dropped

_LOOK_S = 0.02
# after which an instance may be in another state
_TELL = ("pause", "resume", "sleep")
# changes that are no updates, for people
_CHANGES = {
    "join_group": "a join of a trainer's group",
    "leave_group": "a leave of a trainer's group",
    "sleep": "a sleep",
    "wake": "a wake",
}


class Change(msgspec.Struct, frozen=True):
    """What all instances are told to change, and not all have changed yet.

    Attributes:
        command: the verb as asked for, without an order.
        task: the change.
        parts: its calls, where it is an update in parts.
        until: of a join: when it has ended, by the loop's clock.
    """

    command: Any
    task: asyncio.Task[Any]
    parts: PartUpdate | None = None
    until: float = 0.0

    @property
    def holds(self) -> bool:
        """Requests are held meanwhile: it is an update of the weights or their label."""
        return name_of(self.command) in ("update_weights", "relabel", "begin_update")


class Outcome(NamedTuple):
    """What came of a call of one instance.

    Attributes:
        reply: None: it did not reply.
        error: that it replied with, or why it did not reply; None: it did as it was told.
    """

    instance: InstanceHandle
    reply: Reply | None
    error: FdasyncError | None


class Label(NamedTuple):
    """The number of weights or of their label, which rises (`request.next_order`), and the label."""

    order: int
    version: str


class ControlPlane:
    """See the module.

    Args:
        remove: called with the address of an instance that the router stops using.
        on_failure: called with an error that is a defect.

    Attributes:
        agreement: decides which weights all instances must have.
        wakes: wakes instances, also instances that are out of reach then.
    """

    def __init__(
        self,
        table: InstanceTable,
        dispatch: Dispatch,
        links: Links,
        config: RouterConfig,
        remove: Callable[[str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._table = table
        self._dispatch = dispatch
        self._links = links
        self._config = config
        self._remove = remove
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._waiting: dict[int, tuple[InstanceHandle, asyncio.Future[Reply]]] = {}
        # what is under way; `_begin` and `_ended` alone change it
        self._change: Change | None = None
        # a pause has returned, and no resume came since; calls of `pause` that have not returned
        self._held = False
        self._pausers: set[object] = set()
        self._closed = False
        self.agreement = WeightAgreement(table, self._ask, self._forget, on_failure, config.command_s)
        self.wakes = Wakes(table, self.agreement, self._ask, on_failure, config.command_s)

    @property
    def dropped(self) -> list[Dropped]:
        """Instances that the router has stopped using, with reasons."""
        return self.agreement.dropped

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights or their label is under way."""
        return self._change is not None and self._change.holds

    @property
    def _parts(self) -> PartUpdate | None:
        """The update in parts that takes calls; None: there is none."""
        parts = None if self._change is None else self._change.parts
        return None if parts is None or parts.has_ended else parts

    # -- one instance -------------------------------------------------------------------------------

    async def one(self, instance: InstanceHandle, command: Any, limit_s: float) -> Reply:
        """Send a command and wait for its success. Raises PeerUnreachable, PeerBusy, DeadlineExceeded, and the error
        that the instance replied with: RemoteError, or an error of its kind."""
        _, reply, error = await self._outcome(instance, command, limit_s)
        if error is not None:
            raise error
        assert reply is not None
        return reply

    async def _outcome(self, instance: InstanceHandle, command: Any, limit_s: float) -> Outcome:
        try:
            reply = await self._ask(instance, command, limit_s)
        except FdasyncError as error:
            return Outcome(instance, None, error)
        failure = reply.failure
        return Outcome(instance, reply, None if failure is None else error_of(instance.peer.name, failure))

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _ask(self, instance: InstanceHandle, command: Any, limit_s: float) -> Reply:
        """Send a command; return the instance's reply, success or not."""
        if self._closed:
            raise EngineClosed("closed")
        answer: asyncio.Future[Reply] = self._loop.create_future()
        number = self._number()
        self._waiting[number] = instance, answer
        try:
            instance.peer.send(Call(number, command))
            await wait_within([answer], limit_s)
        finally:
            del self._waiting[number]
        if not answer.done():
            raise DeadlineExceeded(f"{name_of(command)} of {instance.peer.name}", limit_s)
        return answer.result()  # of a future that is done

    def on_reply(self, instance: InstanceHandle, message: Reply) -> None:
        entry = self._waiting.get(message.number)
        if entry is not None and entry[0] is instance and not entry[1].done():
            entry[1].set_result(message)

    def on_lost(self, instance: InstanceHandle, error: PeerUnreachable) -> None:
        for other, answer in self._waiting.values():
            if other is instance and not answer.done():
                fail(answer, error)

    async def drain(self, instance: InstanceHandle, limit_s: float) -> None:
        check_limit_s(limit_s)
        command = verb(Verbs.drain, float(limit_s))
        check_whole("drain", Call(0, command))
        instance.leaving = True
        await self.one(instance, command, limit_s + 1.0)

    # -- all instances ------------------------------------------------------------------------------

    async def all(self, command: Any, limit_s: float) -> None:
        """Send a command to all instances. Raises the first error, after all have replied."""
        outcomes = await self._ask_all(command, limit_s)
        name = name_of(command)
        for instance, reply, error in outcomes:
            if name in _TELL and reply is not None:
                # a pause that another router took back at once is in the next status
                state = reply.standing.state
                paused = name == "pause" and error is None and state == "running"
                instance.was_told("paused" if paused else state)
        _raise_first(outcomes)

    def _limit_s(self, mode: PauseMode | SleepMode) -> float:
        """Of a call that lets requests end in mode "wait", by their own deadlines."""
        return self._config.command_s + (self._config.request_deadline_s if mode == "wait" else 0.0)

    async def pause(self, mode: PauseMode) -> None:
        """Pause all instances. A cancelled call takes its own pause back, and no other's of this router."""
        limit_s = self._limit_s(mode)
        pauser = object()
        self._pausers.add(pauser)
        try:
            await self.all(verb(Verbs.pause, mode), limit_s)
            self._held = self._held or pauser in self._pausers
        except asyncio.CancelledError:
            if self._pausers == {pauser} and not self._held:
                self._say_to(self._table.up(), verb(Verbs.resume))
            raise
        finally:
            self._pausers.discard(pauser)

    async def resume(self) -> None:
        """Resume all instances."""
        self._held = False
        self._pausers.clear()
        await self.all(verb(Verbs.resume), self._config.command_s)

    async def sleep(self, level: Any, mode: Any, tags: Any) -> None:
        """Have all instances sleep; each of them ends its hand-offs, whose requests start again."""
        level, mode = checked_sleep(level, mode)
        named = () if tags is None else checked_tags(tags)
        if tags is not None and not named:
            level = 0
        command = verb(Verbs.sleep, level, mode, named)
        await self._behind_sleeps(command, lambda: self._fall_asleep(command))

    async def _fall_asleep(self, command: Any) -> None:
        limit_s = self._limit_s(command.mode)
        await self._claim_all("sleep", limit_s)
        with self.wakes.falling_asleep(command.level, command.tags):
            await self.all(command, limit_s)

    async def wake(self, tags: Any) -> Doing:
        """Wake all instances, or parts of their memory; returns what the instance farthest from running does then.
        Raises the first error, after all have replied. A cancelled wake goes on."""
        named: tuple[WakeTag, ...] = () if tags is None else checked_tags(tags)
        doing: Doing = await self._behind_sleeps(verb(Verbs.wake, named), lambda: self._wake(named))
        return doing

    async def _wake(self, tags: tuple[WakeTag, ...]) -> Doing:
        await self._claim_all("wake")
        return await self.wakes.wake(tags)

    async def _behind_sleeps(self, command: Any, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a sleep or a wake behind those that are under way, as instances do it, also behind an equal one: the
        other of the two may have come between them."""
        await self._settle()
        while self._change is not None and name_of(self._change.command) in ("sleep", "wake"):
            # bounded by its own limits
            await asyncio.wait([self._change.task])
        return await self._end_of(self._begin(command, work()))

    async def _ask_all(
        self, command: Any, limit_s: float, instances: Sequence[InstanceHandle] | None = None
    ) -> list[Outcome]:
        """What came of a call; first that of instances that replied. `instances`: None: all that are up."""
        asked = self._table.up() if instances is None else instances
        outcomes = await asyncio.gather(*[self._outcome(instance, command, limit_s) for instance in asked])
        return sorted(outcomes, key=lambda one: one.reply is None)

    async def update_weights(self, version: Any, source: str | GroupTensors, mode: Any, expected: Any = None) -> None:
        """Update all instances. A cancelled update goes on; a second call with the same arguments waits for it.

        Tensors come from a group that all instances have joined, or are a part of the update in parts that is open. An
        instance that has not joined it is dropped; if a broadcast fails it fails for all of them."""
        wanted = checked_fingerprint(expected)
        if self._parts is not None and isinstance(source, GroupTensors):
            if wanted is not None:
                raise BadInput("expected", "is of a part of an update", hint="give it where the update ends")
            command = verb(Verbs.update_part, source)
            check_whole("source", Call(0, command))
            label = None if version is None else checked_version(version)
            await self._parts.ask(command)
            if label is not None:
                self._parts.label = label
            return
        # the label that counts one up is known once the instances are claimed
        label = "" if version is None else checked_version(version)
        check_update_mode(mode)
        weights_id = "" if wanted is None else wanted.weights_id
        command = verb(Verbs.update_weights, label, source, mode, expected=weights_id)
        check_whole("source", Call(0, msgspec.structs.replace(command, version=label or FIRST_VERSION)))
        await self._make(command, lambda: self._play(command))

    # -- groups, and updates in parts -------------------------------------------------------------------

    async def join(self, group: WeightsGroup) -> None:
        """Have all instances join a group, with a rank for each of their workers. Raises the first error, and then none
        of them is in it."""
        if not isinstance(group, WeightsGroup):
            raise BadInput("group", f"{type(group).__name__} is no WeightsGroup")
        await self._settle()
        asked: list[tuple[InstanceHandle, Any]] = []
        rank = group.rank
        for instance in sorted(self._table.up(), key=lambda instance: instance.address):
            command = verb(Verbs.join_group, msgspec.structs.replace(group, rank=rank))
            check_whole("group", Call(0, command))
            asked.append((instance, command))
            rank += instance.workers
        if not asked:
            raise PeerUnreachable("router", "no instance is there")
        if rank > group.world_size:
            problem = f"ranks {group.rank} to {rank - 1} are needed of a group of {group.world_size}"
            hint = f"the instances have {rank - group.rank} workers, and the trainer is rank 0"
            raise BadInput("group.world_size", problem, hint=hint)
        until = self._loop.time() + group.timeout_s
        change = self._begin(verb(Verbs.join_group, group), self._join(group, asked), until=until)
        try:
            await self._end_of(change)
        except asyncio.CancelledError:
            # the other ranks of the group must not wait for these any longer
            change.task.cancel()
            raise

    async def _join(self, group: WeightsGroup, asked: list[tuple[InstanceHandle, Any]]) -> None:
        limit_s = group.timeout_s + self._config.command_s
        joins = {asyncio.ensure_future(self.one(instance, command, limit_s)): instance for instance, command in asked}
        leave = verb(Verbs.leave_group, group.name)
        try:
            # bounded by `limit_s`
            ended, others = await asyncio.wait(joins, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for join in ended if (error := join.exception()) is not None]
            if not errors:
                return
            # if one rank does not come, the others wait in vain, and hold their requests up
            self._say_to([joins[join] for join in others], leave)
            if others:
                await asyncio.wait(others)
        except asyncio.CancelledError:
            for join in joins:
                join.cancel()
            await self._ask_all(leave, self._config.command_s, list(joins.values()))
            raise
        # an instance that was busy did not begin, and may be joining a group of that name for another caller
        left = [instance for join, instance in joins.items() if not isinstance(join.exception(), UpdateUnderWay)]
        await self._ask_all(leave, self._config.command_s, left)
        # of several, the error that tells more than that another rank did not come
        raise min(errors, key=lambda error: isinstance(error, WeightsRejected))

    def _say_to(self, instances: Iterable[InstanceHandle], command: Any) -> None:
        """Send a command for whose reply nobody waits."""
        for instance in instances:
            with contextlib.suppress(FdasyncError):
                instance.peer.send(Call(self._number(), command))

    async def leave(self, name: Any) -> None:
        command = verb(Verbs.leave_group, name)
        check_whole("name", Call(0, command))
        await self._settle()
        limit_s, change = self._config.command_s, self._change
        if change is not None and name_of(change.command) == "join_group" and change.command.group.name == name:
            # the leave ends the join
            await self.all(command, limit_s)
        else:
            await self._make(command, lambda: self.all(command, limit_s))

    async def begin(self, mode: Any) -> None:
        """Begin an update in parts at all instances; an instance that cannot is dropped."""
        check_update_mode(mode)
        await self._settle()
        command = verb(Verbs.begin_update, mode)
        parts = PartUpdate()
        self._begin(command, self._play_parts(parts, command), parts=parts)
        # bounded by the limits of what the task waits for
        await asyncio.wait([parts.begun])
        parts.begun.result()  # of a future that is done

    async def end(self, version: Any, expected: Any = None) -> None:
        parts = self._parts
        if parts is None:
            raise BadInput("end_weight_update", "no update is open", hint="it begins with begin_weight_update")
        wanted = checked_fingerprint(expected)
        label = "" if version is None else checked_version(version)
        weights_id = "" if wanted is None else wanted.weights_id
        await parts.ask(verb(Verbs.end_update, label, expected=weights_id))

    async def abandon(self) -> None:
        if self._parts is not None:
            await self._parts.ask(verb(Verbs.abandon_update))

    async def _play_parts(self, parts: PartUpdate, begin: Any) -> None:
        limit_s = self._config.command_s
        ended: FdasyncError | None = None
        begun = False
        try:
            latest = await self._make_room("begin_update")
            members = self._success(await self._ask_all(begin, limit_s), drops=True)
            begun = True
            parts.begun.set_result(None)
            while True:
                command, answer = await parts.next(limit_s)
                played = False
                try:
                    begun = await self._play_part(parts, command, members, latest)
                    played = True
                except FdasyncError as error:
                    fail(answer, error)
                    raise
                finally:
                    if not answer.done() and not played:
                        # this task is cancelled, or has a defect: its caller waits without a limit
                        fail(answer, EngineClosed("closed"))
                if not answer.done():
                    answer.set_result(None)
                if not begun:
                    return
        except FdasyncError as error:
            ended = error
        finally:
            parts.end(ended)
        if begun:
            # what came of it is for each instance to say
            await self._ask_all(verb(Verbs.abandon_update), limit_s)

    async def _play_part(
        self, parts: PartUpdate, command: Any, members: list[tuple[InstanceHandle, Reply]], latest: Label
    ) -> bool:
        """One call of an update in parts; False: it was the last one. `latest`: see `_make_room`."""
        limit_s = self._config.command_s
        name = name_of(command)
        ends = name == "end_update" and parts.parts > 0
        if name == "end_update":
            label = command.version or parts.label or next_version(latest.version)
            order, weights_id = next_order(latest.order, label), secrets.token_hex(16)
            command = msgspec.structs.replace(command, version=label, order=order, weights_id=weights_id)
        present = [instance for instance, _ in members if instance.peer.is_up]
        took = self._success(await self._ask_all(command, limit_s, present), drops=name != "abandon_update")
        parts.parts += name == "update_part"
        if ends:
            # of tensors, which come once: there is no folder
            self._agree(verb(Verbs.update_weights, command.version, "", "abort", command.order), took)
        return name == "update_part"

    def _success(self, outcomes: list[Outcome], *, drops: bool) -> list[tuple[InstanceHandle, Reply]]:
        """The instances that did as they were told. If any did, others are dropped by name, unless they sleep or have
        no whole weights. If none did, raises the first error, an awake instance's before any other."""
        took = []
        for instance, reply, error in outcomes:
            if reply is not None:
                instance.was_told(reply.standing.state)
                if error is None:
                    took.append((instance, reply))
        if not took:
            # what an instance says that was awake is about the weights
            errors = [one.error for one in outcomes if one.error is not None]
            raise min(errors, key=lambda error: isinstance(error, Asleep), default=self._nobody())
        for instance, _, error in outcomes if drops else ():
            if isinstance(error, Asleep) or (isinstance(error, WeightsRejected) and instance.lacks_weights):
                self.agreement.keep(instance, sleeps=isinstance(error, Asleep))
            elif error is not None and not isinstance(error, UpdateUnderWay):
                self.agreement.drop(instance, str(error))
        return took

    def _nobody(self) -> FdasyncError:
        """The error of a command that is for instances with the weights of this router, where none has them."""
        if self._table.up():
            return UpdateUnderWay("of another router, whose weights this one is about to adopt")
        return PeerUnreachable("router", "no instance is there")

    async def relabel(self, version: Any) -> None:
        """Give the weights of all instances another label; cancelling as in `update_weights`."""
        label = checked_version(version)
        if self._parts is not None and self._parts.label == label:
            return
        command = verb(Verbs.relabel, label)
        await self._make(command, lambda: self._play(command))

    async def fingerprint(self) -> str:
        """Have all instances hash their weights that do not wait for others. Raises WeightsDiffer where the weights are
        not the same."""
        instances = [one for one in self._table.up() if not one.behind]
        values = await self._values(verb(Verbs.fingerprint), self._config.command_s, instances)
        first = next(iter(values.values()))
        for name, value in values.items():
            if value != first:
                raise WeightsDiffer(first, value, where=name)
        return first

    async def profile(self, seconds: float) -> dict[str, str]:
        """Have all instances record what they do; the folder of each. Raises the first error, behind all replies."""
        return await self._values(verb(Verbs.profile, seconds), seconds + self._config.command_s, self._table.up())

    async def _values(self, command: Any, limit_s: float, instances: Sequence[InstanceHandle]) -> dict[str, str]:
        outcomes = await self._ask_all(command, limit_s, instances)
        _raise_first(outcomes)
        if not outcomes:
            raise self._nobody()
        return {one.instance.peer.name: one.reply.value for one in outcomes if one.reply is not None}

    def _check_still(self) -> None:
        """Raise UpdateUnderWay where a change is under way."""
        change = self._change
        if change is not None:
            version = getattr(change.command, "version", "")
            way = f", to version {version}" if version else ", in parts" if change.parts is not None else ""
            if change.until:
                group, left_s = change.command.group, max(change.until - self._loop.time(), 0.0)
                by = f"joins the group {group.name!r} by {group.address}:{group.port}"
                way = f": it {by}, for up to {left_s:.0f} s more unless that group is left"
            what = _CHANGES.get(name_of(change.command), "another update")
            where = f"of this router{way}, and version {self._table.weight_version} is in use"
            raise UpdateUnderWay(where, f"{what} is under way")

    async def _settle(self) -> None:
        """Wait for the end of a join that its caller has given up."""
        if self._change is not None and (self._change.task.done() or self._change.task.cancelling()):
            # bounded by `command_s`: the instances leave
            await asyncio.wait([self._change.task])

    async def _make(self, command: Any, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Make a change, or wait for the same one."""
        await self._settle()
        change = self._change
        if change is None or change.command != command:
            change = self._begin(command, work())
        await self._end_of(change)

    @staticmethod
    async def _end_of(change: Change) -> Any:
        # bounded by the limits of what it waits for
        await asyncio.wait([change.task])
        if change.task.cancelled():
            raise EngineClosed("closed")
        return change.task.result()  # of a task that is done

    def _begin(
        self,
        command: Any,
        work: Coroutine[Any, Any, Any],
        *,
        parts: PartUpdate | None = None,
        until: float = 0.0,
    ) -> Change:
        """Raises UpdateUnderWay where a change is under way."""
        try:
            self._check_still()
        except UpdateUnderWay:
            work.close()
            raise
        task = self._loop.create_task(work, name="fdasync-weights")
        self._change = change = Change(command, task, parts, until)
        if change.holds:
            self._dispatch.hold()
            self.agreement.held = True
        # also ends a change that is cancelled before its first step. Callers that wait for the task go on after this
        task.add_done_callback(self._ended)
        return change

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # the error is for the caller; a cancelled caller may never read it: this marks it as read
        error = None if task.cancelled() else task.exception()
        if not task.cancelled():
            # one that waits for other weights may have been claimed, and not asked
            self._say_to([one for one in self._table.up() if error or one.behind], verb(Verbs.release))
        if self._parts is not None:
            # cancelled before its first step
            self._parts.end(EngineClosed("closed"))
        held, self._change = self.is_updating, None
        if held:
            self._dispatch.release()
        if held and not self._closed:
            self.agreement.held = False
            self.agreement.judge_all()
        if isinstance(error, Exception) and not isinstance(error, FdasyncError):
            self._on_failure(error)

    async def _play(self, command: Any) -> None:
        restart = name_of(command) == "update_weights"
        latest = await self._make_room(name_of(command))
        label = command.version or next_version(latest.version)
        command = msgspec.structs.replace(command, version=label, order=next_order(latest.order, label))
        if restart and not folder_of(command):
            command = msgspec.structs.replace(command, weights_id=secrets.token_hex(16))
        # an instance with other weights does not get the label of these
        asked = [one for one in self._table.up() if restart or not one.behind]
        took = self._success(await self._ask_all(command, self._config.command_s, asked), drops=True)
        self._agree(command, took)

    async def _make_room(self, change: str) -> Label:
        """Claim all instances; returns the latest label among them. Hand-overs end, or begin again behind an update of
        the weights."""
        await self.agreement.quiet(self._config.command_s)
        latest = await self._claim_all(change)
        if change != "relabel":
            await self._let_hand_overs_finish()
        return latest

    async def _claim_all(self, change: str, limit_s: float = 0.0) -> Label:
        """Claim all instances, so that no other router changes any of them. All routers claim in the same order, so
        that one of two routers gets all instances. Raises UpdateUnderWay. A change that fails gives its claims back
        (`_ended`); at an instance that does as it is told they end with that.

        Args:
            change: as of `Verbs.claim`.
            limit_s: of the change, where it is not `command_s` behind the end of hand-offs.

        Returns the latest label: this router may not have heard yet what another router brought a moment ago."""
        config = self._config
        claim_s = config.command_s + max(config.handoff_s + config.command_s, limit_s)
        command = verb(Verbs.claim, change, min(claim_s, MOST_S))
        latest = Label(self._table.weight_order, self._table.weight_version)
        for instance in sorted(self._table.up(), key=lambda instance: instance.address):
            try:
                reply = await self.one(instance, command, config.command_s)
            except UpdateUnderWay:
                raise
            except FdasyncError:
                # the instance is gone, or will not take the change either
                continue
            if reply.standing.weight_order > latest.order:
                latest = Label(reply.standing.weight_order, reply.standing.weight_version)
        return latest

    async def _let_hand_overs_finish(self) -> None:
        """Wait for hand-offs. Hand-offs of paused instances cannot finish: they begin again at once."""
        with contextlib.suppress(TimeoutError):
            async with Within(self._config.handoff_s):
                while any(  # noqa: ASYNC110 - no event announces the end
                    request.first is None or not request.first.is_paused
                    for request in self._dispatch.being_handed_over()
                ):
                    await asyncio.sleep(_LOOK_S)
        for request in self._dispatch.being_handed_over():
            # a request that a caller has read from does not begin again: the update ends it, as it ends running ones
            if not request.delivered:
                self._dispatch.restart(request)

    def _agree(self, command: Any, took: list[tuple[InstanceHandle, Reply]]) -> None:
        """Adopt the namespace that most instances have; drop the instances with another one."""
        (namespace, _), *_ = Counter([reply.standing.namespace for _, reply in took]).most_common(1)
        is_delta = any(reply.standing.is_delta for _, reply in took if reply.standing.namespace == namespace)
        self.agreement.agreed(command, namespace, is_delta=is_delta and bool(folder_of(command)))
        for instance, reply in took:
            has = reply.standing
            if has.namespace == namespace:
                instance.has(namespace, has.weight_version, has.weight_order)
            else:
                self.agreement.drop(instance, "its weights are not those of the others after the update")

    def _forget(self, instance: InstanceHandle) -> None:
        if self._table.instances.get(instance.peer) is instance and not self._closed:
            self._remove(instance.address)

    async def aclose(self) -> None:
        """Stop an update; instances finish the commands that they have."""
        self._closed = True
        if self._change is not None:
            self._change.task.cancel()
            await wait_within([self._change.task], 1.0)
        await self.wakes.aclose()
        await self.agreement.aclose()
        for _, answer in self._waiting.values():
            # nobody reads replies any more
            if not answer.done():
                fail(answer, EngineClosed("closed"))


def _raise_first(outcomes: list[Outcome]) -> None:
    """Raise the first error, if there is one."""
    for one in outcomes:
        if one.error is not None:
            raise one.error
