"""The one guard around a store: limits, deadlines, a circuit breaker, kills, and checks of what the store answers.

A deadline stops the waiting, never the work: a late call keeps its parts and its room until the store has let go of
them, and a call that grows too old has the store's process killed (docs/design.md, rule 5). `call.py` has the states of
a call, this module what moves a call from one to the next; `breaker.py` says when a store is left alone.

It uses the running loop's time, so virtual time works. It starts no threads. No task of it outlives `aclose`, but one
of a store that cannot be stopped, or whose closing was cancelled. `engine/store_stack.py` makes a guard, and
`engine/store_io.py` calls it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.cache.store.guard.answers import fits, told_of
from fdasync.cache.store.guard.breaker import Breaker
from fdasync.cache.store.guard.call import Call, Line
from fdasync.errors import PLUGIN_ERRORS, FdasyncError, StoreBusy, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.deadlines import Closing, DeadlineTimer, wait_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.store.guard.limits import GuardLimits
    from fdasync.events.catalog import Event, StoreVerb
    from fdasync.ipc.shared_memory import SharedRegion


class GuardedStore(Store):
    """See the module. It owns the store inside: it opens, kills and closes it. While it has it open, no other guard can
    open the same object: the regions of two engines must not mix.

    A verb raises StoreTimeout at its deadline; `error.ended` is done when the call has really ended, and only then are
    the parts free. A cancelled verb cancels the inner verb and waits for its end, until the deadline too: then it
    raises StoreTimeout instead of CancelledError, because the parts are still in use. An answer or an error that breaks
    the contract becomes StoreUnavailable. `begin` is for callers that wait for several calls.

    Args:
        inner: the store inside, not open yet.
        name: of the store in errors, events and capabilities.
        publish: takes `StoreCalled`, one for each call that somebody waited for, and `BreakerChanged`.
        closing: how long `aclose` may take, and a `kill` outside of it; shared with other parts.

    Attributes:
        inner: the store inside.
        capabilities: of the store inside; until it is open, the defaults.
        breaker: whether calls go through.
        line: the calls that have room, and those that wait for it.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self, inner: Store, limits: GuardLimits, *, name: str, publish: Callable[[Event], None], closing: Closing
    ) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.capabilities = Capabilities(name=name, durability="none")
        self.line = Line(limits.max_calls, limits.max_nbytes)
        self.breaker = Breaker(limits, name=name, publish=publish, probe=self._probe)
        self.name = name
        self._limits = limits
        self._publish = publish
        self._closing = closing
        # whether this guard marked the store inside as in use
        self._has_it = False
        # what to open the store inside with; None: it is open
        self._unopened: tuple[SharedRegion, ...] | None = ()
        self._running: set[Call] = set()
        self._kills: set[asyncio.Task[None]] = set()

    # -- the contract ---------------------------------------------------------------------------------

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Open the store inside. Raises its errors; StoreUnavailable only where the limits require the store, else
        calls raise that until a later attempt succeeds."""
        self._unopened = tuple(regions)
        call = self._probe("")
        try:
            await self._result(call)
        except StoreUnavailable as error:
            if self._limits.required:
                raise
            self.breaker.trip(error.problem, call)

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        return cast("int", await self._result(self.begin("exists_prefix", keys)))

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        return cast("list[Outcome]", await self._result(self.begin("get_into", items)))

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        return cast("list[Outcome]", await self._result(self.begin("put", items)))

    async def delete(self, keys: Sequence[str]) -> int:
        return cast("int", await self._result(self.begin("delete", keys)))

    async def usage(self) -> StoreUsage:
        return cast("StoreUsage", await self._result(self.begin("usage", ())))

    async def kill(self, why: str) -> bool:
        """Kill the store inside; calls in line end, and verbs that this does not end are cancelled. False if that does
        not end them either."""
        self.breaker.period += 1
        self._empty_line()
        left = list(self._running)
        killed = await self._kill_inner(why)
        if killed and left:
            # the verbs have ended: let their tasks take their last turns
            await self._settle(left, 0.0)
        for call in left:
            self._cancel(call)
        await self._settle(left, self._closing.left_s / 2)
        return (killed or bool(left)) and all(call.state == "ended" for call in left)

    async def aclose(self) -> None:
        """Refuse calls, wait for those that run, kill them half-way to the deadline, close the store inside.

        Raises StoreTimeout, naming the calls that never ended.
        """
        self._closing.begin()
        await self.breaker.shut()
        self._empty_line()
        for call in self._running:
            if call.state == "late":
                # the deadline of closing counts now
                call.stop_timer()
            if call.period < 0:
                self._cancel(call)
        patience_s = self._closing.left_s / 2
        await self._settle(self._running, patience_s)
        if self._running:
            await self.kill(f"{self._names()} did not end in {patience_s:g} s before it was closed")
        if self._has_it:
            await self._close_inner()
        await self._settle(self._running, self._closing.left_s)
        if self._kills:
            await wait_within(self._kills, self._closing.left_s)
        for call in self._running:
            raise StoreTimeout(self.name, self._names(), self._closing.limit_s, call.ended)

    # -- calls ----------------------------------------------------------------------------------------

    def begin(self, verb: StoreVerb, argument: Sequence[Any]) -> Call:
        """Ask for a verb, and do not wait: the call may have ended already, refused. `waited` waits for calls."""
        nbytes = sum([part.nbytes for item in argument for part in item.parts]) if verb in ("get_into", "put") else 0
        call = Call(verb, argument, nbytes, self.breaker.period)
        refusal = self.breaker.refusal
        if refusal:
            self._end(call, StoreUnavailable(self.name, refusal))
        else:
            self._wait_in_line(call)
        return call

    async def _result(self, call: Call) -> Any:
        """Wait for a call. Raises its error; a cancelled waiter cancels the call."""
        cancelled: asyncio.CancelledError | None = None
        while not call.waited.done():
            try:
                await asyncio.wait([call.waited])
            except asyncio.CancelledError as error:
                cancelled = error
                self._cancel(call)
        if call.late is not None:
            raise call.late
        if cancelled is not None:
            raise cancelled
        return call.ended.result()  # of a future that is done

    def _probe(self, key: str) -> Call:
        """Open the store inside, or look a key up in one that is open; whatever the breaker says."""
        if self._unopened is not None:
            return self._wait_in_line(Call("open", self._unopened, 0, -1))
        return self._wait_in_line(Call("exists_prefix", [key], 0, -1))

    def _wait_in_line(self, call: Call) -> Call:
        self.line.join(call)
        self._next()
        if call.state == "waiting":
            self._set_timer(call, self._limits.call_s, self._waits_too_long)
        return call

    def _next(self) -> None:
        for call in self.line.turns():
            call.stop_timer()
            call.state = "running"
            self._running.add(call)
            # a task of its own: its caller may stop waiting
            call.task = asyncio.get_running_loop().create_task(self._perform(call), name=self._name_of(call))
            call.task.add_done_callback(partial(self._performed, call))
            limit_s = self._limits.open_s if call.verb == "open" else self._limits.call_s
            self._set_timer(call, limit_s, partial(self._is_late, limit_s))

    async def _perform(self, call: Call) -> Any:
        """Call the verb of the store inside. An answer or an error that breaks the contract is StoreUnavailable."""
        verb, argument = call.verb, call.argument
        expected = FdasyncError if verb == "open" else (StoreUnavailable, StoreRejected)
        try:
            if verb == "open":
                await self._open_inner(argument)
                return None
            answer = await (self.inner.usage() if verb == "usage" else getattr(self.inner, verb)(argument))
        except expected:
            raise
        except PLUGIN_ERRORS as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            problem = f"{verb} broke the contract: {type(error).__name__}: {error}"
            raise StoreUnavailable(self.name, problem) from error
        if not fits(verb, argument, answer):
            raise StoreUnavailable(self.name, f"{verb} broke the contract: it answered {answer!r:.200}")
        return answer

    def _performed(self, call: Call, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._end(call, StoreUnavailable(self.name, f"{call.verb} was ended"))
        elif (error := task.exception()) is not None:
            self._end(call, error)
        else:
            self._end(call, None, task.result())  # of a task that is done

    def _waits_too_long(self, call: Call) -> None:
        self.line.leave(call)
        problem = f"{self.line.calls} calls before this one did not end within {self._limits.call_s:g} s"
        self._end(call, StoreBusy(self.name, problem))

    def _is_late(self, limit_s: float, call: Call) -> None:
        call.state = "late"
        call.late = StoreTimeout(self.name, call.verb, limit_s, call.ended)
        self._report(call, call.late, None)
        call.waited.set_result(None)
        if self._limits.kill_s is not None and self.breaker.state != "shut":
            kill_s = max(self._limits.kill_s, limit_s)
            self._set_timer(call, kill_s - limit_s, partial(self._is_too_old, kill_s))

    def _is_too_old(self, kill_s: float, call: Call) -> None:
        why = f"{self._name_of(call)} had not ended after {kill_s:g} s"
        kill = asyncio.get_running_loop().create_task(self._kill_for(call, why), name=f"kill of store {self.name}")
        self._kills.add(kill)
        kill.add_done_callback(self._kills.discard)

    async def _kill_for(self, call: Call, why: str) -> None:
        """Kill the store, which ends every call; of a store that cannot be killed cancel this call alone."""
        if await self._kill_inner(why):
            await self._settle([call], 0.0)
        self._cancel(call)

    def _cancel(self, call: Call) -> None:
        """The caller gave the call up. A call that runs ends when the store lets go of its parts."""
        if call.task is not None:
            call.task.cancel()
        elif call.state == "waiting":
            call.period = -1
            self.line.leave(call)
            self._end(call, StoreUnavailable(self.name, f"{call.verb} was ended"))

    def _empty_line(self) -> None:
        for call in self.line.empty():
            self._end(call, StoreUnavailable(self.name, "the call was ended while it waited in line"))

    def _end(self, call: Call, error: BaseException | None, answer: Any = None) -> None:
        """The one way in which a call ends: gives back all that it held."""
        call.stop_timer()
        before, call.state = call.state, "ended"
        if call.ended.cancelled():
            # by a caller that waited for it
            pass
        elif error is None:
            call.ended.set_result(answer)
        else:
            call.ended.set_exception(error)
            # read here, so that asyncio does not warn where no caller reads the error
            call.ended.exception()
        if call in self._running:
            self._running.discard(call)
            self.line.free(call)
        if before != "late":
            call.waited.set_result(None)
            self._report(call, error, answer)
        self._next()

    def _report(self, call: Call, error: BaseException | None, answer: Any) -> None:
        """The waiting for a call is over: tell the breaker and the taps. How a call ends that was given up says nothing
        of the store; that it is late does."""
        if call.period < 0 or (call.state == "ended" and call.task is not None and call.task.cancelling()):
            return
        if call.period == self.breaker.period:
            self.breaker.judge(error, answer)
        self._publish(told_of(self.name, call, error, answer))

    def _set_timer(self, call: Call, seconds: float, passed: Callable[[Call], None]) -> None:
        loop = asyncio.get_running_loop()
        call.stop_timer()
        call.timer = DeadlineTimer(loop, loop.time() + seconds, partial(passed, call))

    def _name_of(self, call: Call) -> str:
        return f"{call.verb} of store {self.name}"

    def _names(self) -> str:
        return ", ".join(sorted(map(self._name_of, self._running)))

    # -- the store inside -----------------------------------------------------------------------------

    async def _open_inner(self, regions: Sequence[SharedRegion]) -> None:
        if not self._has_it:
            if self.inner.in_use:
                raise StoreUnavailable(self.name, "another engine has this object open; each needs one of its own")
            self._has_it = self.inner.in_use = True
        await self.inner.open(regions)
        self.capabilities = msgspec.structs.replace(self.inner.capabilities, name=self.name)
        self._unopened = None

    async def _kill_inner(self, why: str) -> bool:
        """Whether the store was killed. A store that raises, or takes too long, cannot be killed."""
        if not self._has_it:
            return False
        kill = asyncio.ensure_future(self.inner.kill(why))
        await self._bound(kill)
        ended = kill.done() and not kill.cancelled() and kill.exception() is None
        return ended and kill.result()  # of a task that is done

    async def _close_inner(self) -> None:
        close = asyncio.ensure_future(self.inner.aclose())
        # also where the caller of `aclose` gives up before that
        close.add_done_callback(self._let_go)
        await self._bound(close)
        if close.cancelled() or not close.done():
            raise StoreTimeout(self.name, self._names() or "aclose", self._closing.limit_s, close)
        close.result()  # of a task that is done

    def _let_go(self, _closed: asyncio.Task[None]) -> None:
        self._has_it = self.inner.in_use = False

    async def _bound(self, work: asyncio.Task[Any]) -> None:
        """Wait for a kill or a close as long as the closing deadline allows, and cancel it then."""
        # retrieved, so that asyncio does not warn
        work.add_done_callback(lambda work: work.cancelled() or work.exception())
        _, late = await wait_within([work], self._closing.left_s + self._limits.reap_s)
        if late:
            # no caller waits for it any more
            work.cancel()
            await wait_within([work], 0.0)

    async def _settle(self, calls: Sequence[Call] | set[Call], limit_s: float) -> None:
        # by their tasks: a caller that waited for `ended` may have cancelled that
        left = [call.task for call in calls if call.state != "ended" and call.task is not None]
        if left:
            await wait_within(left, limit_s)
