"""A wrapper around any runner that delays and breaks its steps, from one seed.

asyncio fixes the order inside the loop, so runs differ only by outside events: when a step completes, and whether it
does. `FaultRunner` draws both from one seeded `Random`. Until its fault strikes it keeps a runner's contract: steps
complete in the order of launch. It also records the ids of all steps.

Knows no engine. Used by simulations, tests and `held_engine`; give it to `Engine(config, runner=...)`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from fdasync.errors import FdasyncError, RunnerError, WorkerDied, WorkerStuck
from fdasync.ipc.remote import forwarding
from fdasync.runner.base import Capacity, Runner, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.ipc.remote import Method
    from fdasync.runner.base import CopyOutput

StepFaultKind = Literal["fail", "hang", "die"]
# with their ends new weights are in place
_LOADS = ("load_folder", "end_tensors", "end_received")


class StepFault(msgspec.Struct, frozen=True):
    """A fault of one step of a runner. (Faults of stores are `StoreFaults`.)

    Attributes:
        kind: "fail": the step ends with RunnerError. "hang": it never ends. "die": it and every other step
            in flight end with WorkerDied. The runner does nothing after any of them.
        step_id: the step that the fault strikes.
    """

    kind: StepFaultKind
    step_id: int


@forwarding(Runner)
class FaultRunner(Runner):
    """A runner around another one.

    Args:
        inner: does the work.
        random: draws delays; the caller seeds it.
        max_delay_s: a completed step is reported up to this much later; 0 reports at once.
        fault: at most one: an engine does not outlive it.
        on_launch: called with each step, before its launch.
        on_done: called with the output of each step, before the step is reported as done.
        on_copied: called with each copy of blocks when it is reported as done.
        on_weights: called when the runner has new weights, before any step on them.

    Attributes:
        inner: the runner that does the work.
        launched: ids of all steps, in order.
        completed: the number of steps that were reported as done.
        struck: the fault has struck; `broken` is true after a `die` by hand too.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self,
        inner: Runner,
        random: Random,
        *,
        max_delay_s: float = 0.0,
        fault: StepFault | None = None,
        on_launch: Callable[[RunStep], None] | None = None,
        on_done: Callable[[StepOutput], None] | None = None,
        on_copied: Callable[[SwapOut | SwapIn], None] | None = None,
        on_weights: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(inner.config, inner.limits)
        self.inner = inner
        self.launched: list[int] = []
        self.completed = 0
        self.struck = False
        self._random = random
        self._max_delay_s = max_delay_s
        self._fault = fault
        self._on_launch = on_launch
        self._on_done = on_done
        self._on_copied = on_copied
        self._on_weights = on_weights
        self._copies: dict[int, asyncio.Future[CopyOutput]] = {}
        self._copy_timers: dict[int, asyncio.TimerHandle] = {}
        self._broken: Exception | None = None
        self._held = False
        self._futures: dict[int, asyncio.Future[StepOutput]] = {}
        self._order: deque[int] = deque()
        self._outcomes: dict[int, StepOutput | BaseException] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # outcomes of steps that are done and not reported yet, in order
        self._delayed: dict[int, StepOutput | BaseException] = {}
        self._reported_at = 0.0
        self._worked = -1
        self._reached: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def broken(self) -> bool:
        """The fault has struck, or `die` was called."""
        return self._broken is not None

    def assert_struck(self) -> None:
        """Raise AssertionError unless the fault has struck. A test that injects a fault ends with this call: without
        it the test may pass because nothing happened."""
        fault = self._fault
        if fault is None:
            raise AssertionError(f"no fault was injected ({len(self.launched)} steps were launched)")
        if not self.struck:
            last = f"the last was step {self.launched[-1]}" if self.launched else "there was no step"
            raise AssertionError(f"the fault {fault.kind!r} of step {fault.step_id} never struck: {last}")

    # -- by hand --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold back the reports of completed steps until `release`."""
        self._held = True

    def release(self, count: int | None = None) -> None:
        """Report the next `count` completed steps and hold the later ones; None: report all, and hold no longer."""
        self._held = count is not None
        self._report_next(len(self._order) if count is None else count)

    async def reached(self, step_id: int, deadline_s: float = 120.0) -> None:
        """Wait until the runner has done the work of this step, which is then held if `hold` is on."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reached.append((step_id, done))
        self._report_reached()
        async with asyncio.timeout(deadline_s):
            await done

    def die(self) -> None:
        """End as a runner whose process died: every step in flight fails, and `on_failure` is called."""
        self._broken = error = WorkerDied("simulated runner", -1, -9)
        for step_id in list(self._futures):
            self._report(step_id, error)
        self._order.clear()
        self._delayed.clear()
        for copied in self._copies.values():
            if not copied.done():
                copied.set_exception(error)
        self._copies.clear()
        if self.on_failure is not None:
            self.on_failure(error)

    # -- a runner -------------------------------------------------------------------------------------

    async def open(self) -> Capacity:
        return await self.inner.open()

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        self.inner.on_failure = self._inner_failed
        await self.inner.bind(num_blocks, arena, host, snapshots)

    async def forward(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the runner behind does, for all methods of the contract that are not written here."""
        value = await getattr(self.inner, method.name)(*args, **kwargs)
        if self._on_weights is not None and (method.name in _LOADS or kwargs.get("last")):
            self._on_weights()
        return value

    def take_back(self, key: int) -> None:
        self.inner.take_back(key)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        done: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            # a runner that hangs ends nothing
            if self._fault is None or self._fault.kind != "hang":
                done.set_exception(self._broken)
            return done
        self._copies[copy.copy_id] = done
        self.inner.copy(copy).add_done_callback(lambda inner: self._copy_done(copy, inner))
        return done

    def _copy_done(self, copy: SwapOut | SwapIn, inner: asyncio.Future[CopyOutput]) -> None:
        if inner.cancelled():
            return
        if not self._max_delay_s:
            self._report_copy(copy, inner)
            return
        # copies may end in any order
        delay_s = self._random.uniform(0.0, self._max_delay_s)
        loop = asyncio.get_running_loop()
        self._copy_timers[copy.copy_id] = loop.call_later(delay_s, self._report_copy, copy, inner)

    def _report_copy(self, copy: SwapOut | SwapIn, inner: asyncio.Future[CopyOutput]) -> None:
        self._copy_timers.pop(copy.copy_id, None)
        done = self._copies.pop(copy.copy_id, None)
        error = inner.exception()
        if done is None or done.done():
            return
        if error is not None:
            done.set_exception(error)
            return
        if self._on_copied is not None:
            self._on_copied(copy)
        done.set_result(inner.result())  # of a future that is done

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        done: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        self.launched.append(step.step_id)
        if self._on_launch is not None:
            self._on_launch(step)
        self._futures[step.step_id] = done
        self._order.append(step.step_id)
        fault = self._fault
        if self._broken is None and fault is not None and fault.step_id == step.step_id:
            self.struck = True
            if fault.kind == "die":
                self.die()
            else:
                self._broken = RunnerError("the simulated step failed", fault.step_id)
        if self._broken is None:
            self.inner.launch(step).add_done_callback(lambda inner: self._inner_done(step.step_id, inner))
        elif fault is None or fault.kind != "hang":
            # a runner that hangs ends nothing; a runner that failed or died ends every step with its error, in order
            self._settle(step.step_id, self._broken)
        return done

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        if self._broken is not None:
            return WorkerStuck("simulated runner", -1, what, deadline_s)
        return self.inner.overdue(what, deadline_s)

    async def aclose(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for timer in self._copy_timers.values():
            timer.cancel()
        for done in self._futures.values():
            done.cancel()
        for copied in self._copies.values():
            copied.cancel()
        self._copy_timers.clear()
        self._copies.clear()
        self._timers.clear()
        self._futures.clear()
        self._delayed.clear()
        self._order.clear()
        await self.inner.aclose()

    def _inner_failed(self, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(error)

    # -- reports, in the order of launch --------------------------------------------------------------

    def _inner_done(self, step_id: int, inner: asyncio.Future[StepOutput]) -> None:
        if inner.cancelled():
            return
        error = inner.exception()
        self._worked = step_id
        self._settle(step_id, inner.result() if error is None else error)  # of a future that is done
        self._report_reached()

    def _report_reached(self) -> None:
        for step_id, done in self._reached:
            if step_id <= self._worked and not done.done():
                done.set_result(None)

    def _settle(self, step_id: int, outcome: StepOutput | BaseException) -> None:
        if step_id not in self._futures:
            return
        self._outcomes[step_id] = outcome
        if not self._held:
            self._report_next(len(self._order))

    def _report_next(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        while count and self._order and self._order[0] in self._outcomes:
            count -= 1
            step_id = self._order.popleft()
            outcome = self._outcomes.pop(step_id)
            if not self._max_delay_s:
                self._report(step_id, outcome)
                continue
            # reports keep their order, whatever delays are drawn
            due = loop.time() + self._random.uniform(0.0, self._max_delay_s)
            self._reported_at = max(self._reported_at, due)
            self._delayed[step_id] = outcome
            self._timers[step_id] = loop.call_at(self._reported_at, self._report_up_to, step_id)

    def _report_up_to(self, step_id: int) -> None:
        """Report a step that is due, and the steps before it first: real loops round the times of their timers."""
        for earlier in list(self._delayed):
            self._report(earlier, self._delayed.pop(earlier))
            if earlier == step_id:
                return

    def _report(self, step_id: int, outcome: StepOutput | BaseException) -> None:
        timer = self._timers.pop(step_id, None)
        if timer is not None:
            timer.cancel()
        done = self._futures.pop(step_id, None)
        if done is None or done.done():
            return
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            self.completed += 1
            if self._on_done is not None:
                self._on_done(outcome)
            done.set_result(outcome)
