"""Disorder at the edges, from one seed: a wrapper around any runner that delays and breaks its steps.

asyncio promises order inside the loop, so what varies between runs comes from outside: when a step
completes, and whether it does. `EdgeRunner` draws both from one seeded `Random` and keeps a runner's
contract while it is well: steps complete in the order of launch. It also writes down every step it saw.

Knows no engine. Used by simulations; give it to `Engine(config, runner=...)`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from fdasync.errors import FdasyncError, RunnerError, WorkerDied, WorkerStuck
from fdasync.runner.base import Capacity, Runner, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from fdasync.actions import RunStep
    from fdasync.cache.arena import AuxArena

FaultKind = Literal["fail", "hang", "die"]


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong, and when.

    Attributes:
        kind: "fail": the step ends with RunnerError. "hang": it never ends. "die": it and every other step
            in flight end with WorkerDied. The runner does nothing after any of them.
        step_id: the step that meets it.
    """

    kind: FaultKind
    step_id: int


class EdgeRunner(Runner):
    """A runner around another one.

    Args:
        inner: does the work.
        random: draws delays; the caller seeds it.
        max_delay_s: a completed step is reported up to this much later; 0 reports at once.
        fault: at most one: an engine does not outlive it.
        on_launch: called with each step, before it is launched.

    Attributes:
        launched: ids of all steps, in order.
        completed: how many were reported as done.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self,
        inner: Runner,
        random: Random,
        *,
        max_delay_s: float = 0.0,
        fault: Fault | None = None,
        on_launch: Callable[[RunStep], None] | None = None,
    ) -> None:
        super().__init__(inner.config, inner.limits)
        self.inner = inner
        self.launched: list[int] = []
        self.completed = 0
        self._random = random
        self._max_delay_s = max_delay_s
        self._fault = fault
        self._on_launch = on_launch
        self._broken: Exception | None = None
        self._reported_at = 0.0
        self._waiting: dict[int, asyncio.Future[StepOutput]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    @property
    def broken(self) -> bool:
        """The fault has struck."""
        return self._broken is not None

    async def open(self) -> Capacity:
        return await self.inner.open()

    async def bind(self, num_blocks: int, arena: AuxArena | None) -> None:
        await self.inner.bind(num_blocks, arena)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[StepOutput] = loop.create_future()
        self.launched.append(step.step_id)
        if self._on_launch is not None:
            self._on_launch(step)
        if self._broken is None and self._fault is not None and self._fault.step_id == step.step_id:
            self._break(self._fault)
        self._waiting[step.step_id] = done
        if self._broken is not None:
            # a runner that hangs answers nothing, one that failed or died answers everything with that
            if self._fault is None or self._fault.kind != "hang":
                self._report(step.step_id, self._broken)
            return done
        self.inner.launch(step).add_done_callback(lambda inner: self._inner_done(step.step_id, inner))
        return done

    def overdue(self, step_id: int, deadline_s: float) -> FdasyncError:
        if self._broken is not None:
            return WorkerStuck("simulated runner", -1, f"step {step_id}", deadline_s)
        return self.inner.overdue(step_id, deadline_s)

    async def aclose(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for done in self._waiting.values():
            done.cancel()
        self._waiting.clear()
        await self.inner.aclose()

    def _break(self, fault: Fault) -> None:
        if fault.kind == "fail":
            self._broken = RunnerError("the simulated step failed", fault.step_id)
        else:
            self._broken = WorkerDied("simulated runner", -1, -9)
        if fault.kind == "die":
            for step_id in list(self._waiting):
                self._report(step_id, self._broken)

    def _inner_done(self, step_id: int, inner: asyncio.Future[StepOutput]) -> None:
        if inner.cancelled() or step_id not in self._waiting:
            return
        error = inner.exception()
        loop = asyncio.get_running_loop()
        delay_s = self._random.uniform(0.0, self._max_delay_s) if self._max_delay_s else 0.0
        # in order, whatever was drawn
        self._reported_at = max(self._reported_at, loop.time() + delay_s)
        outcome = inner.result() if error is None else error
        if self._max_delay_s:
            self._timers[step_id] = loop.call_at(self._reported_at, self._report, step_id, outcome)
        else:
            self._report(step_id, outcome)

    def _report(self, step_id: int, outcome: StepOutput | BaseException) -> None:
        timer = self._timers.pop(step_id, None)
        if timer is not None:
            timer.cancel()
        done = self._waiting.pop(step_id, None)
        if done is None or done.done():
            return
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            self.completed += 1
            done.set_result(outcome)
