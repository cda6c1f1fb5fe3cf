"""A circuit breaker: a store that hangs or fails gets no calls, until a probe is answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.cache.store.base import Capabilities
from fdasync.cache.store.wrappers.base import Wrapper
from fdasync.errors import StoreBusy, StoreTimeout, StoreUnavailable
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from fdasync.cache.store.base import Store
    from fdasync.events.catalog import StoreVerb
    from fdasync.ipc.shared_memory import SharedRegion

BreakerState = Literal["closed", "open", "half_open"]

# the key that a probe looks up; no object has it
PROBE_KEY = "fdasync-probe"


class Breaker(Wrapper):
    """Closed: calls go through. Open: they raise StoreUnavailable at once, and the store is left alone.

    It opens at the first StoreTimeout, or after `failures` calls in a row that failed for now (of a batch: all items).
    A call that never left the line before the store (StoreBusy) counts neither way. After a cooldown a task of the
    breaker looks up one key (half open); an answer closes the breaker, else the cooldown doubles. There is one probe at
    a time: the next one waits for the end of a probe that hangs.

    With `opens_late` a store that cannot be opened for now counts as a failing store: the breaker starts open, and its
    probes are attempts to open the store until one succeeds.

    Args:
        failures: calls in a row that open it.
        cooldown_s: from opening to the first probe, in seconds; it doubles with each probe that fails.
        max_cooldown_s: never longer than this, in seconds.
        probe_s: how long a probe may take, in seconds.
        on_state: called in the loop at each change, with the reason in words; it must not raise.
        opens_late: StoreUnavailable at `open` is no error.
        name: of the store in errors and `capabilities`, before it is open too; "": its own.

    Attributes:
        state: the present one.
        why: the reason for the state, in words.
        refused: calls that were not let through.
        late: calls that were answered after their timeout.
    """

    def __init__(
        self,
        inner: Store,
        *,
        failures: int = 5,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 60.0,
        probe_s: float = 5.0,
        on_state: Callable[[BreakerState, str], None] | None = None,
        opens_late: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(inner, name=name)
        self.state: BreakerState = "closed"
        self.refused = 0
        self.late = 0
        self.why = ""
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._probe_s = probe_s
        self._on_state = on_state
        self._opens_late = opens_late
        self._unopened = False
        self._regions: Sequence[SharedRegion] = ()
        self._failed = 0  # in a row
        self._round = 0  # number of the closed state; the end of a call counts only in the round that it began in
        self._recovering: asyncio.Task[None] | None = None
        self._probing: asyncio.Future[Any] | None = None

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The capabilities of the store inside; until it is open, the defaults."""
        if self._unopened:
            return Capabilities(name=self.name, durability="none")
        inner = self.inner.capabilities
        return msgspec.structs.replace(inner, name=self._given_name) if self._given_name else inner

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Open the store inside. With `opens_late` calls raise StoreUnavailable until it is open, and not this."""
        self._regions = tuple(regions)
        try:
            await self._open_inner()
        except StoreUnavailable as error:
            if not self._opens_late:
                raise
            self._unopened = True
            self._open(error.problem, error.ended if isinstance(error, StoreTimeout) else None)

    async def _open_inner(self) -> None:
        await super().open(self._regions)
        self._unopened = False

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        if self.state != "closed":
            self.refused += 1
            raise StoreUnavailable(self.name, f"it gets no calls for now: {self.why}")
        era, round_ = self.era, self._round
        try:
            answer = await self.ask(verb, argument, era)
        except StoreTimeout as error:
            error.ended.add_done_callback(self._came_back)
            if (era, round_) == (self.era, self._round):
                self._open(error.problem)
            raise
        except StoreBusy:
            raise
        except StoreUnavailable as error:
            if (era, round_) == (self.era, self._round):
                self._count(error.problem)
            raise
        if (era, round_) == (self.era, self._round):
            problem = _failed_wholly(verb, answer)
            if problem:
                self._count(problem)
            else:
                self._failed = 0
        return answer

    async def aclose(self) -> None:
        """End the probe, close the store."""
        self._closed = True
        recovering, probing = self._recovering, self._probing
        if recovering is not None:
            recovering.cancel()
            await wait_within([recovering], self._probe_s)
        if probing is not None:
            probing.cancel()
        await super().aclose()
        if probing is not None and not probing.done():
            # the probe ends with the store, in a few turns
            await wait_within([probing], 0.0)

    # -- states ---------------------------------------------------------------------------------------

    def _count(self, problem: str) -> None:
        self._failed += 1
        if self._failed >= self._failures:
            self._open(f"{self._failed} calls in a row failed, the last one: {problem}")

    def _open(self, why: str, hanging: asyncio.Future[Any] | None = None) -> None:
        if self.state == "closed" and not self._closed:
            self._round += 1
            self._tell("open", why)
            self._recovering = asyncio.get_running_loop().create_task(
                self._recover(hanging), name=f"recovery of store {self.name}"
            )

    def _tell(self, state: BreakerState, why: str) -> None:
        self.state = state
        self.why = why
        if self._on_state is not None:
            self._on_state(state, why)

    def _came_back(self, ended: asyncio.Future[Any]) -> None:
        # a call that was ended was never answered
        if not ended.cancelled() and ended.exception() is None:
            self.late += 1

    # -- the probe ------------------------------------------------------------------------------------

    async def _recover(self, hanging: asyncio.Future[Any] | None) -> None:
        cooldown_s = self._cooldown_s
        while True:
            await self._rest(hanging, cooldown_s)
            self._tell("half_open", "a probe is under way")
            problem, hanging = await self._probe()
            if not problem:
                self._failed = 0
                self._tell("closed", "the probe was answered")
                return
            self._tell("open", problem)
            cooldown_s = min(2.0 * cooldown_s, self._max_cooldown_s)

    async def _rest(self, hanging: asyncio.Future[Any] | None, cooldown_s: float) -> None:
        """Wait until the next probe: after a cooldown, or as soon as a hanging call has succeeded after all."""
        while hanging is not None:
            while not hanging.done():
                await wait_within([hanging], cooldown_s)
            error = None if hanging.cancelled() else hanging.exception()
            if error is None and not hanging.cancelled():
                # while the store is not open, only its opening can hang
                self._unopened = False
                return
            hanging = error.ended if isinstance(error, StoreTimeout) else None
        await asyncio.sleep(cooldown_s)

    async def _probe(self) -> tuple[str, asyncio.Future[Any] | None]:
        """The problem, or ""; and the call that must end before the next probe, if one hangs."""
        work: Coroutine[Any, Any, Any]
        work = self._open_inner() if self._unopened else self.ask("exists_prefix", [PROBE_KEY], self.era)
        probe = asyncio.get_running_loop().create_task(work, name=f"probe of store {self.name}")
        self._probing = probe
        # retrieved, so that asyncio does not warn
        probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        await wait_within([probe], self._probe_s)
        if not probe.done():
            return f"a probe was not answered within {self._probe_s:g} s", probe
        if probe.cancelled():
            return "a probe was cancelled", None
        error = probe.exception()
        if isinstance(error, StoreTimeout):
            return error.problem, error.ended
        return ("" if error is None else str(error)), None


def _failed_wholly(verb: StoreVerb, answer: Any) -> str:
    """The first problem, if every item of a call failed for now; else ""."""
    if verb in ("get_into", "put") and answer and all(one.status == "failed" and one.transient for one in answer):
        return str(answer[0].problem)
    return ""
