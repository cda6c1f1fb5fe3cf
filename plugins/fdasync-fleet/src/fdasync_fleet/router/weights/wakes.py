"""Wakes a router's instances; an instance out of reach is woken as soon as it is reached.

The router remembers which parts of memory its callers want awake. An instance that did not get a wake, or failed to
wake, is unwoken (`InstanceHandle.memory`) and gets no requests. It is woken when there is a link to it, again and again
until it is awake; where a call of `wake` had its reply, the caller has the error, and wakes it again. Instances that
another router has put to sleep are left alone, unless they missed a wake of this one.

Knows no requests. An instance that has woken is brought to the weights that it lacks (`agreement.py`). Called by
`router/router.py` and `router/control.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from fdasync.errors import FdasyncError, WeightsBroken, WeightsRejected
from fdasync.ipc.deadlines import wait_within
from fdasync.request import MemoryPart, WakeTag
from fdasync_fleet.messages import Reply
from fdasync_fleet.router.instances import farthest
from fdasync_fleet.verbs import Verbs, error_of, verb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from fdasync.request import Doing
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable
    from fdasync_fleet.router.weights.agreement import WeightAgreement

_PARTS: frozenset[WakeTag] = frozenset(get_args(MemoryPart))
_ALL: frozenset[WakeTag] = frozenset(get_args(WakeTag))
#: why an instance that did not wake with the others gets no requests
UNWOKEN = "it did not wake when this router's instances were woken, and gets no requests until it has"
# errors of a wake whose memory came back, and whose dropped weights did not
_NOT_LOADED = ("WeightsRejected", "WeightsBroken")
# between two tries to wake an instance that is there
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.5, 8.0


class Wakes:
    """See the module.

    Args:
        tell: sends a command to an instance and returns its reply, within so many seconds. Raises PeerUnreachable,
            PeerBusy, DeadlineExceeded.
        fail: called with an error that is a defect.
        limit_s: how long an instance may take to wake.
    """

    def __init__(
        self,
        table: InstanceTable,
        agreement: WeightAgreement,
        tell: Callable[[InstanceHandle, Any, float], Awaitable[Reply]],
        fail: Callable[[Exception], None],
        limit_s: float,
    ) -> None:
        self._table = table
        self._agreement = agreement
        self._tell = tell
        self._fail = fail
        self._limit_s = limit_s
        # what a caller of this router has woken since it was put to sleep last
        self._woken: frozenset[WakeTag] = frozenset()
        self._tasks: dict[InstanceHandle, asyncio.Task[None]] = {}
        self._closed = False

    @contextmanager
    def falling_asleep(self, level: int, tags: Sequence[WakeTag]) -> Iterator[None]:
        """While all instances are told to sleep. `tags`: the parts that are meant; (): all."""
        before = self._woken
        # an instance asleep at level 0 would go on with any part that is woken
        self._woken = before - (frozenset(tags) or _PARTS) - {"scheduling"} if level else frozenset()
        try:
            yield
        except FdasyncError:
            if not any(one.doing in ("asleep", "waking") for one in self._table.up()):
                # all have refused
                self._woken = before
            raise

    async def wake(self, tags: tuple[WakeTag, ...]) -> Doing:
        """See `ControlPlane.wake`. `tags`: (): all."""
        self._woken |= frozenset(tags) or _ALL
        for instance in self._table.instances.values():
            if not instance.peer.is_up:
                instance.wakes("unwoken")
        asked = self._table.up()
        verbs = [self._missed() if one.memory == "unwoken" else verb(Verbs.wake, tags) for one in asked]
        # take each reply at once: taken later, it would tell of a time before the instance was brought its weights
        results = await asyncio.gather(*[self._wake_one(one, wake) for one, wake in zip(asked, verbs, strict=True)])
        for instance in asked:
            await self._agreement.quiet(self._limit_s, instance)
        # dropped weights that could not be loaded again do not count where this router has brought others
        errors = [
            error
            for instance, error in zip(asked, results, strict=True)
            if error is not None
            and not (isinstance(error, (WeightsRejected, WeightsBroken)) and instance.doing in ("running", "paused"))
        ]
        if errors:
            raise errors[0]
        return farthest([instance.doing for instance in asked])

    async def _wake_one(self, instance: InstanceHandle, wake: Any) -> FdasyncError | None:
        try:
            outcome: Reply | FdasyncError = await self._tell(instance, wake, self._limit_s)
        except FdasyncError as error:
            outcome = error
        return self._took(instance, outcome)

    def _missed(self) -> Any:
        """A wake of all that is to be awake."""
        return verb(Verbs.wake, () if self._woken >= _PARTS else tuple(sorted(self._woken)))

    def _took(self, instance: InstanceHandle, outcome: Reply | FdasyncError) -> FdasyncError | None:
        """Take the outcome of a wake; returns its error if it failed."""
        if not isinstance(outcome, Reply):
            instance.wakes("unwoken")
            self._again(instance)
            return outcome
        state, failure = outcome.standing.state, outcome.failure
        kind = "" if failure is None else failure.kind
        slept = instance.memory == "unwoken" or instance.doing in ("asleep", "waking")
        instance.was_told(state)
        instance.wakes("unwoken" if failure is not None and state in ("asleep", "waking") else "as_told")
        if kind == "UpdateUnderWay" and slept:
            # the instance refused before it tried to wake
            instance.wakes("unwoken")
            self._again(instance)
        self._agreement.woke(instance, lacks_all=state == "waits_for_weights" or kind in _NOT_LOADED)
        return None if failure is None else error_of(instance.peer.name, failure)

    # -- instances that are unwoken -------------------------------------------------------------------

    def joined(self, instance: InstanceHandle) -> None:
        """This router begins to use it: it has missed what the others were told."""
        if self._woken:
            instance.wakes("unwoken")
        self.on_up(instance)

    def on_up(self, instance: InstanceHandle) -> None:
        """There is a link to it."""
        if instance.memory == "unwoken" and instance.peer.is_up:
            self._again(instance)

    def on_status(self, instance: InstanceHandle) -> None:
        """It has told its status."""
        if instance.is_awake:
            instance.wakes("as_told")
            self._agreement.woke(instance, lacks_all=instance.said == "waits_for_weights")

    async def aclose(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await wait_within(list(self._tasks.values()), 1.0)

    def _again(self, instance: InstanceHandle) -> None:
        if instance in self._tasks or self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._wake_late(instance), name="fdasync-wake")
        self._tasks[instance] = task

        def ended(_: object) -> None:
            del self._tasks[instance]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._fail(error)
            elif instance.peer.is_up and self._woken:
                # it came to owe one in the very turn in which this one ended
                self.on_up(instance)

        task.add_done_callback(ended)

    async def _wake_late(self, instance: InstanceHandle) -> None:
        """Wake it until it is awake, is lost again, or is to sleep on. Its link's end, and its next status, end the
        loop."""
        pause_s = _FIRST_AGAIN_S
        while instance.memory == "unwoken" and instance.peer.is_up and self._woken:
            await self._wake_one(instance, self._missed())
            if instance.memory == "unwoken":
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_AGAIN_S)
