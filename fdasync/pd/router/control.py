"""Sends a router's commands to its instances: weight updates, pauses, drains. Each instance replies once to a command.

A weight update, or a new label for the weights in use, is a barrier (docs/design.md, rule 22): the router holds new
requests, lets hand-offs finish (before an update), updates all instances under one weights id, drops by name the
instances that fail, and goes on. It is a task of the router: if its caller is cancelled, it still runs to its end. Then
each instance has the new weights, is being brought to them (`weight_agreement.py`), or is dropped.

Knows nothing of requests but which are being handed over. Called by `router/router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import errors
from fdasync.errors import (
    BadInput,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    PeerUnreachable,
    RemoteError,
    UpdateUnderWay,
    WakeFailed,
    WeightsDiffer,
)
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.pd.messages import Command, Done
from fdasync.pd.router.validation import check_limit_s, check_whole
from fdasync.pd.router.weight_agreement import WeightAgreement
from fdasync.request import (
    checked_fingerprint,
    checked_sleep,
    checked_tags,
    checked_version,
    next_order,
    next_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.pd.link.links import Links
    from fdasync.pd.router.config import RouterConfig
    from fdasync.pd.router.dispatch import Dispatch
    from fdasync.pd.router.instances import InstanceHandle, InstanceTable
    from fdasync.pd.router.weight_agreement import Dropped
    from fdasync.request import PauseMode

_LOOK_S = 0.02
# after which an instance may be in another state
_TELL = ("pause", "resume", "sleep", "wake")


class Update(msgspec.Struct, frozen=True):
    """An update of the weights or their label that runs, or whose outcome no caller has read.

    Attributes:
        command: as asked for, without an order.
        task: the update.
    """

    command: Command
    task: asyncio.Task[None]


class ControlPlane:
    """See the module.

    Args:
        remove: called with the address of an instance that the router stops using.
        on_failure: called with an error that is a defect.

    Attributes:
        agreement: decides which weights all instances must have.
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
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._waiting: dict[int, tuple[InstanceHandle, asyncio.Future[Done]]] = {}
        # the namespace that each label named
        self._used: dict[str, bytes] = {}
        self._update: Update | None = None
        # a pause has returned, and no resume came since; calls of `pause` that have not returned
        self._held = False
        self._pausers: set[object] = set()
        self._closed = False
        self.agreement = WeightAgreement(table, self._ask, self._forget, on_failure, config.command_s)

    @property
    def dropped(self) -> list[Dropped]:
        """Instances that the router has stopped using, with reasons."""
        return self.agreement.dropped

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights or their label is under way."""
        return self._update is not None and not self._update.task.done()

    # -- one instance -------------------------------------------------------------------------------

    async def one(self, instance: InstanceHandle, command: Command, limit_s: float) -> Done:
        """Send a command and wait for its success. Raises PeerUnreachable, PeerBusy, DeadlineExceeded, and the error
        that the instance replied with: RemoteError, or an error of its kind."""
        done = await self._ask(instance, command, limit_s)
        if done.error:
            raise _error_of(instance, done)
        return done

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _ask(self, instance: InstanceHandle, command: Command, limit_s: float) -> Done:
        """Send a command; return the instance's reply, success or not."""
        answer: asyncio.Future[Done] = self._loop.create_future()
        number = self._number()
        self._waiting[number] = instance, answer
        try:
            instance.peer.send(msgspec.structs.replace(command, number=number))
            await wait_within([answer], limit_s)
        finally:
            del self._waiting[number]
        if not answer.done():
            raise DeadlineExceeded(f"{command.verb} of {instance.peer.name}", limit_s)
        return answer.result()  # of a future that is done

    def on_done(self, instance: InstanceHandle, message: Done) -> None:
        entry = self._waiting.get(message.number)
        if entry is not None and entry[0] is instance and not entry[1].done():
            entry[1].set_result(message)

    def on_lost(self, instance: InstanceHandle, error: PeerUnreachable) -> None:
        for other, answer in self._waiting.values():
            if other is instance and not answer.done():
                answer.set_exception(error)

    async def drain(self, instance: InstanceHandle, limit_s: float) -> None:
        check_limit_s(limit_s)
        command = Command(0, "drain", limit_s=float(limit_s))
        check_whole("drain", command)
        instance.leaving = True
        await self.one(instance, command, limit_s + 1.0)

    # -- all instances ------------------------------------------------------------------------------

    async def all(self, command: Command, limit_s: float) -> None:
        """Send a command to all instances. Raises the first error, after all have replied."""
        answers, silent = await self._ask_all(command, limit_s)
        for instance, done in answers:
            if command.verb in _TELL:
                # a pause that another router took back at once is in the next status
                paused = command.verb == "pause" and not done.error and done.state == "running"
                instance.was_told("paused" if paused else done.state)
        failed = [_error_of(instance, done) for instance, done in answers if done.error]
        failed += [error for _, error in silent]
        if failed:
            raise failed[0]

    async def pause(self, mode: PauseMode) -> None:
        """Pause all instances. A cancelled call takes its own pause back, and no other's of this router."""
        limit_s = self._config.command_s
        if mode == "wait":
            # requests end by their own deadlines
            limit_s += self._config.request_deadline_s
        pauser = object()
        self._pausers.add(pauser)
        try:
            await self.all(Command(0, "pause", pause=mode), limit_s)
            self._held = self._held or pauser in self._pausers
        except asyncio.CancelledError:
            if self._pausers == {pauser} and not self._held:
                for instance in self._table.up():
                    with contextlib.suppress(FdasyncError):
                        instance.peer.send(Command(self._number(), "resume"))
            raise
        finally:
            self._pausers.discard(pauser)

    async def resume(self) -> None:
        """Resume all instances."""
        self._held = False
        self._pausers.clear()
        await self.all(Command(0, "resume"), self._config.command_s)

    async def sleep(self, level: Any, mode: Any, tags: Any) -> None:
        """Have all instances sleep; each of them ends its hand-offs, whose requests start again."""
        level, mode = checked_sleep(level, mode)
        named = () if tags is None else checked_tags(tags)
        if tags is not None and not named:
            level = 0
        limit_s = self._config.command_s
        if mode == "wait":
            # requests end by their own deadlines
            limit_s += self._config.request_deadline_s
        await self.all(Command(0, "sleep", level=level, sleep=mode, tags=named), limit_s)

    async def wake(self, tags: Any) -> None:
        """Wake all instances, or parts of their memory."""
        named = () if tags is None else checked_tags(tags)
        if tags is not None and not named:
            return
        await self.all(Command(0, "wake", tags=named), self._config.command_s)

    async def _ask_all(
        self, command: Command, limit_s: float
    ) -> tuple[list[tuple[InstanceHandle, Done]], list[tuple[InstanceHandle, FdasyncError]]]:
        """The replies of the instances that are up, and the errors of those that did not reply. An instance with other
        weights than the others does not get their label."""
        instances = [one for one in self._table.up() if command.verb != "relabel" or not one.behind]
        outcomes = await asyncio.gather(
            *[self._ask(instance, command, limit_s) for instance in instances], return_exceptions=True
        )
        answers: list[tuple[InstanceHandle, Done]] = []
        silent: list[tuple[InstanceHandle, FdasyncError]] = []
        for instance, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, Done):
                answers.append((instance, outcome))
            elif isinstance(outcome, FdasyncError):
                silent.append((instance, outcome))
            else:
                raise outcome
        return answers, silent

    async def update_weights(self, version: Any, path: str, mode: Any, expected: Any = None) -> None:
        """Update all instances. A cancelled update goes on; a second call with the same arguments waits for it."""
        label = self._next_label() if version is None else checked_version(version)
        if mode not in ("abort", "keep"):
            raise BadInput("mode", f"{mode!r} is neither 'abort' nor 'keep'")
        wanted = checked_fingerprint(expected)
        weights_id = "" if wanted is None else wanted.weights_id
        command = Command(0, "update_weights", version=label, path=path, mode=mode, expected=weights_id)
        check_whole("source", command)
        # instances compare the folder with the weights in use
        refused = label in self._used and label != self._table.weight_version
        await self._change(command, "a version is used again only while it is in use" if refused else "")

    async def relabel(self, version: Any) -> None:
        """Give the weights of all instances another label; cancelling as in `update_weights`."""
        label = checked_version(version)
        refused = self._used.get(label, self._table.namespace) != self._table.namespace
        await self._change(Command(0, "relabel", version=label), "other weights had it" if refused else "")

    def _next_label(self) -> str:
        label = next_version(self._table.weight_version)
        while label in self._used:
            label = next_version(label)
        return label

    async def _change(self, command: Command, refusal: str) -> None:
        """Make an update, or wait for the same one. `refusal`: why its label cannot be used; ""."""
        update = self._update
        if update is None or update.command != command:
            if update is not None and not update.task.done():
                raise UpdateUnderWay(f"of this router, to version {update.command.version}")
            if refusal:
                raise BadInput("version", f"{command.version!r} was used before", hint=refusal)
            update = self._update = self._begin(command)
        # bounded by the limits of what it waits for
        await asyncio.wait([update.task])
        if self._update is update:
            self._update = None
        if update.task.cancelled():
            raise EngineClosed("closed")
        update.task.result()  # of a task that is done

    def _begin(self, command: Command) -> Update:
        self._dispatch.hold()
        self.agreement.held = True
        task = self._loop.create_task(self._play(command), name="fdasync-weights")
        task.add_done_callback(self._ended)
        return Update(command, task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # the error is for the caller; a cancelled caller may never read it, so mark it as read
        _ = task.cancelled() or task.exception()
        self.agreement.held = False
        self.agreement.judge_all()
        self._dispatch.release()

    async def _play(self, command: Command) -> None:
        await self.agreement.quiet(self._config.command_s)
        await self._claim_all()
        if command.verb == "update_weights":
            await self._let_hand_overs_finish()
        order = next_order(self._table.weight_order, command.version)
        command = msgspec.structs.replace(command, order=order)
        answers, silent = await self._ask_all(command, self._config.command_s)
        took = [(instance, done) for instance, done in answers if not done.error]
        refused = [(instance, _error_of(instance, done)) for instance, done in answers if done.error]
        if not took:
            errors = [error for _, error in refused + silent]
            raise errors[0] if errors else PeerUnreachable("router", "no instance is there")
        self._agree(command, took)
        for instance, error in refused + silent:
            if not isinstance(error, UpdateUnderWay):
                self.agreement.drop(instance, str(error))

    async def _claim_all(self) -> None:
        """Claim all instances, so that no other router updates any of them. All routers claim in the same order, so
        that one of two gets them all. Raises UpdateUnderWay, and then has claimed none."""
        config = self._config
        command = Command(0, "claim", limit_s=config.handoff_s + 2 * config.command_s)
        claimed: list[InstanceHandle] = []
        for instance in sorted(self._table.up(), key=lambda instance: instance.address):
            try:
                await self.one(instance, command, config.command_s)
            except UpdateUnderWay:
                for other in claimed:
                    with contextlib.suppress(FdasyncError):
                        other.peer.send(Command(self._number(), "release"))
                raise
            except FdasyncError:
                # the instance is gone, or will not take the update either
                continue
            claimed.append(instance)

    async def _let_hand_overs_finish(self) -> None:
        """Wait for hand-offs. Those of paused instances cannot finish: they begin again at once."""
        with contextlib.suppress(TimeoutError):
            async with Within(self._config.handoff_s):
                while any(  # noqa: ASYNC110 - no event announces the end
                    request.first is None or not request.first.is_paused
                    for request in self._dispatch.being_handed_over()
                ):
                    await asyncio.sleep(_LOOK_S)
        for request in self._dispatch.being_handed_over():
            self._dispatch.restart(request)

    def _agree(self, command: Command, took: list[tuple[InstanceHandle, Done]]) -> None:
        """Adopt the namespace that most instances have; drop the instances with another one."""
        (namespace, _), *_ = Counter([done.namespace for _, done in took]).most_common(1)
        # the label that was in use may not be known from an update of this router
        self._used.setdefault(self._table.weight_version, self._table.namespace)
        self._used[command.version] = namespace
        self.agreement.agreed(command, namespace)
        for instance, done in took:
            if done.namespace == namespace:
                instance.has(namespace, done.weight_version, done.weight_order)
            else:
                self.agreement.drop(instance, "its weights are not those of the others after the update")

    def _forget(self, instance: InstanceHandle) -> None:
        if self._table.instances.get(instance.peer) is instance and not self._closed:
            self._remove(instance.address)

    async def aclose(self) -> None:
        """Stop an update; instances finish the commands that they have."""
        self._closed = True
        if self._update is not None and not self._update.task.done():
            self._update.task.cancel()
            await wait_within([self._update.task], 1.0)
        await self.agreement.aclose()


def _error_of(instance: InstanceHandle, done: Done) -> FdasyncError:
    kind = getattr(errors, done.error, None)
    if done.error == "UpdateUnderWay":
        return UpdateUnderWay(f"says {instance.peer.name}")
    if done.error == "WeightsDiffer":
        return WeightsDiffer(done.expected, done.held, where=instance.peer.name)
    if done.error in ("WeightsRejected", "WeightsBroken") and kind is not None:
        error: FdasyncError = kind(f"{instance.peer.name}: {done.problem}")
        return error
    if done.error == "ConfigError":
        return ConfigError(done.field, f"{instance.peer.name}: {done.problem}")
    if done.error == "WakeFailed":
        return WakeFailed(done.field, f"{instance.peer.name}: {done.problem}")
    if done.error == "BadInput":
        return BadInput(done.field, f"{instance.peer.name}: {done.problem}")
    return RemoteError(instance.peer.name, done.error, done.problem)
