"""The circuit breaker of a guarded store: a store that hangs or fails gets no calls, until a probe is answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from fdasync.cache.store.guard.call import waited
from fdasync.errors import StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.events.catalog import BreakerChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.store.guard.call import Call
    from fdasync.cache.store.guard.limits import GuardLimits
    from fdasync.events.catalog import Event

BreakerState = Literal["closed", "open", "half_open", "shut"]

# the key that a probe looks up; no object has it
PROBE_KEY = "fdasync-probe"


class Breaker:
    """Closed: calls go through. Open: they are refused at once, and the store is left alone. Half open: a probe is
    under way. Shut: the guard is closed, for ever.

    It opens at the first call that is late, or after so many calls in a row that failed for now. A call that never left
    the line (StoreBusy) counts neither way. After a cooldown a task looks up one key. An answer closes the breaker;
    without one the cooldown doubles. There is one probe at a time: the next one waits for the end of a probe that
    hangs. The probes of a store that could not be opened are attempts to open it.

    Args:
        name: of the store, in events.
        publish: takes `BreakerChanged`.
        probe: asks for a key, or opens a store that is not open.

    Attributes:
        state: the present one.
        left_alone: the latest change; None while calls go through.
        period: rises when calls so far say nothing any more of the store: with each kill, and when the breaker opens.
    """

    def __init__(
        self, limits: GuardLimits, *, name: str, publish: Callable[[Event], None], probe: Callable[[str], Call]
    ) -> None:
        self.state: BreakerState = "closed"
        self.left_alone: BreakerChanged | None = None
        self.period = 0
        self._limits = limits
        self._name = name
        self._probe = probe
        self._publish = publish
        self._failed = 0  # in a row
        self._recovering: asyncio.Task[None] | None = None

    @property
    def refusal(self) -> str:
        """Why calls do not go through; "": they do."""
        if self.state == "shut":
            return "it is closed"
        return "" if self.left_alone is None else f"it gets no calls for now: {self.left_alone.problem}"

    def judge(self, error: BaseException | None, answer: Any) -> None:
        """A call that went through was answered, failed or is late."""
        if self.state != "closed" or isinstance(error, StoreRejected | StoreBusy):
            return
        if isinstance(error, StoreTimeout):
            self.trip(error.problem)
            return
        problem = error.problem if isinstance(error, StoreUnavailable) else _failed_wholly(answer)
        self._failed = self._failed + 1 if problem else 0
        if self._failed >= self._limits.failures:
            self.trip(f"{self._failed} calls in a row failed, the last one: {problem}")

    def trip(self, why: str, hanging: Call | None = None) -> None:
        """Leave the store alone. `hanging` ends before the first probe, and ends the cooldown if it succeeds."""
        if self.state == "closed":
            self.period += 1
            self._tell("open", why)
            name = f"recovery of store {self._name}"
            self._recovering = asyncio.get_running_loop().create_task(self._recover(hanging), name=name)

    async def shut(self) -> None:
        """Refuse every call from now on, and probe no more."""
        self.state = "shut"
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.wait([self._recovering])

    def _tell(self, state: Literal["closed", "open", "half_open"], why: str) -> None:
        self.state = state
        event = BreakerChanged(store=self._name, state=state, problem=why)
        self.left_alone = None if state == "closed" else event
        self._publish(event)

    async def _recover(self, hanging: Call | None) -> None:
        cooldown_s = self._limits.retry_s
        while True:
            await self._rest(hanging, cooldown_s)
            self._tell("half_open", "a probe is under way")
            probe = self._probe(PROBE_KEY)
            await waited([probe])
            hanging = None if probe.ended.done() else probe
            error = probe.late or probe.ended.exception()
            if error is None:
                self._failed = 0
                self._tell("closed", "the probe was answered")
                return
            self._tell("open", error.problem if isinstance(error, StoreTimeout) else str(error))
            cooldown_s = min(2.0 * cooldown_s, self._limits.max_retry_s)

    async def _rest(self, hanging: Call | None, cooldown_s: float) -> None:
        """Wait until the next probe: after a cooldown, or as soon as a hanging call has succeeded after all."""
        if hanging is not None:
            await asyncio.wait([hanging.ended])
            if hanging.ended.exception() is None:
                return
        await asyncio.sleep(cooldown_s)


def _failed_wholly(answer: Any) -> str:
    """The first problem, if every item of a call failed for now; else ""."""
    if isinstance(answer, list) and answer and all(one.status == "failed" and one.transient for one in answer):
        return str(answer[0].problem)
    return ""
