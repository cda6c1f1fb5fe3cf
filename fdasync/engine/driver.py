"""The driver: runs the pure scheduler's turns, and performs its actions.

Once per loop turn it drains the bus, calls `handle` once, performs the actions in order and feeds the taps. It decides
nothing, and knows no texts and no requests. Exactly one event answers each asynchronous action. A step or a copy that
is overdue, or anything that is raised here or in `handle`, fails the engine through `on_failure`; an interrupt of the
program goes on to the program. Made by `engine/runtime.py`; the bus calls it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fdasync.errors import INTERRUPTS, GrammarFailed, InvariantBroken, ProcessorFailed
from fdasync.events.actions import (
    ELSEWHERE,
    CopyRows,
    EmitTokens,
    FetchBlocks,
    FinishRequest,
    HashAgain,
    LookUp,
    RunStep,
    StoreBlocks,
    SwapIn,
    SwapOut,
    TellBlocks,
    WakeAt,
)
from fdasync.events.catalog import StepDone, StepFailed, SwapDone, TimerFired
from fdasync.ipc.deadlines import DeadlineTimer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fdasync.engine.output import OutputProcessor
    from fdasync.engine.prepare import Rehasher
    from fdasync.engine.store_io import StoreIO
    from fdasync.events.actions import Action
    from fdasync.events.bus import EventBus
    from fdasync.events.trace import TraceRing
    from fdasync.runner.base import CopyOutput, Runner, StepOutput
    from fdasync.scheduler import Scheduler


class Attendant(Protocol):
    """What joins an engine to other instances (`fdasync_fleet/instance/instance.py`); an engine is given it when
    it is made.

    Attributes:
        shows_blocks: other instances of this machine shall copy blocks from the devices.
    """

    shows_blocks: bool

    def perform(self, action: Action) -> None:
        """Perform an action of the scheduler that concerns other instances."""

    def weights_changed(self) -> None:
        """The weights in use, or their label, have changed."""

    def engine_failed(self) -> None:
        """The engine has failed, once; requests get its error."""

    async def close_transports(self) -> None:
        """End all copies from and to the engine's arenas, which are freed next. Idempotent."""


class Driver:
    """One engine's turns.

    Args:
        bus: the engine's bus; an event that is published there schedules a turn.
        output: performs actions about tokens, rows and ends.
        rehasher: computes identities again.
        store_io: performs actions about the store; None: there is no store.
        attendant: performs actions that concern other instances; None: there are none.
        step_deadline_s: of each step and of each copy, in seconds.
        trace: records the turns; None: nothing does.
        on_failure: called once, with the error that ends the engine; no turn follows.

    Attributes:
        scheduler: decides.
        broken: a turn ended half done, so the scheduler's state and the results may disagree.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bus: EventBus,
        scheduler: Scheduler,
        runner: Runner,
        output: OutputProcessor,
        rehasher: Rehasher,
        store_io: StoreIO | None,
        attendant: Attendant | None,
        *,
        step_deadline_s: float,
        trace: TraceRing | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._bus = bus
        self._runner = runner
        self._output = output
        self._rehasher = rehasher
        self._store_io = store_io
        self._attendant = attendant
        self._step_deadline_s = step_deadline_s
        self._trace = trace
        self._on_failure = on_failure
        self.broken = False
        self._stopped = False
        self._steps: deque[tuple[int, float]] = deque()
        self._outputs: dict[int, StepOutput] = {}
        self._copies: dict[int, float] = {}
        self._copy_watches: dict[int, DeadlineTimer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: DeadlineTimer | None = None
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._ended_at = 0.0
        bus.attach(self._wake)

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched, and whose results no turn has taken."""
        return len(self._steps) + len(self._outputs)

    @property
    def is_idle(self) -> bool:
        """No step and no copy is in flight."""
        return not self.steps_in_flight and not self._copies

    def stop(self) -> None:
        """No more turns; idempotent. Steps in flight go on in the runner."""
        self._stopped = True
        for timer in (self._timer, self._watchdog, *self._copy_watches.values()):
            if timer is not None:
                timer.cancel()
        self._copy_watches.clear()
        self.tell()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds after a turn, or there are no more turns. The caller sets the deadline."""
        if not self._stopped and not condition():
            waiter = self._loop.create_future()
            self._waiters.append((condition, waiter))
            try:
                await waiter
            finally:
                self._waiters = [entry for entry in self._waiters if entry[1] is not waiter]

    async def wait_idle(self) -> None:
        """Wait until no step and no copy is in flight. The caller sets the deadline."""
        await self.wait_until(lambda: self.is_idle)

    def tell(self) -> None:
        """Look at the conditions that `wait_until` waits for; called after every turn, and when one may hold since."""
        for condition, waiter in self._waiters:
            if not waiter.done() and (self._stopped or condition()):
                waiter.set_result(None)

    # -- a turn -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._stopped:
            return
        events = self._bus.drain()
        try:
            actions = self.scheduler.handle(events)
            if self._trace is not None:
                self._trace.add(events, actions)
            for action in actions:
                self._perform(action)
            for event in events:
                if type(event) is StepDone:
                    self._spoil(self._outputs.pop(event.step_id), None)
            told, events = events, []
            self._bus.feed_taps(told)
            if self._waiters:
                self.tell()
        except BaseException as error:
            # the turn is half done, whatever cut it short: the state of the engine is not known any more
            self.broken = True
            self._bus.feed_taps(events)
            if self._trace is not None:
                error.add_note("\n".join(["the latest events, oldest first:", *self._trace.story()]))
            self._fail(error)
            if isinstance(error, INTERRUPTS):
                raise

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """A callback of the loop: whatever it raises fails the engine."""
        try:
            work(*arguments)
        except BaseException as error:
            self._fail(error)
            if isinstance(error, INTERRUPTS):
                raise

    def _perform(self, action: Action) -> None:
        if type(action) is RunStep:
            self._launch(action)
        elif type(action) is EmitTokens:
            output = self._outputs[action.step_id]
            self._spoil(output, action.keys)
            self._output.emit(action, output)
        elif type(action) is CopyRows:
            self._output.copy_rows(action.spans)
        elif type(action) is FinishRequest:
            self._output.finish(action)
        elif type(action) is WakeAt:
            if self._timer is not None:
                self._timer.cancel()
            # bare timer: it publishes the time, and the scheduler decides
            self._timer = self._loop.call_at(action.time, self._guarded, self._ring)
        elif type(action) is SwapOut or type(action) is SwapIn:
            self._copy(action)
        elif type(action) is HashAgain:
            self._rehasher.add(action)
        elif type(action) is LookUp:
            self._kept(action).look_up(action)
        elif type(action) is FetchBlocks:
            self._kept(action).fetch(action)
        elif type(action) is StoreBlocks:
            self._kept(action).write(action)
        elif type(action) in ELSEWHERE:
            if self._attendant is not None:
                self._attendant.perform(action)
            elif type(action) is not TellBlocks:
                raise InvariantBroken(f"{type(action).__name__} without other instances")
        else:
            raise TypeError(f"the driver knows no action {type(action).__name__}")

    def _spoil(self, output: StepOutput, keys: tuple[int, ...] | None) -> None:
        """End the samples that a step tells problems of: those with a token in it (`keys`) before they get it, or
        (None) those that have none yet. What ended with an earlier step has ended well, whatever came behind it."""
        for kind, told in ((GrammarFailed, output.problems), (ProcessorFailed, output.unprocessed)):
            for key, problem in told:
                if keys is None:
                    self._output.spoil(key, kind(problem), begun=False)
                elif key in keys:
                    self._output.spoil(key, kind(problem))

    def _kept(self, action: Action) -> StoreIO:
        if self._store_io is None:
            raise InvariantBroken(f"{type(action).__name__} without a store")
        return self._store_io

    def _ring(self) -> None:
        self._bus.publish(TimerFired())

    # -- copies of blocks -------------------------------------------------------------------------

    def _copy(self, copy: SwapOut | SwapIn) -> None:
        number = copy.copy_id
        self._copies[number] = self._loop.time()
        overdue = partial(self._guarded, self._copy_overdue, number)
        self._copy_watches[number] = DeadlineTimer(self._loop, self._copies[number] + self._step_deadline_s, overdue)
        self._runner.copy(copy).add_done_callback(partial(self._guarded, self._copied, number))

    def _copied(self, number: int, done: asyncio.Future[CopyOutput]) -> None:
        if self._stopped:
            _ = done.cancelled() or done.exception()
            return
        self._copy_watches.pop(number).cancel()
        started = self._copies.pop(number)
        try:
            output = done.result()  # of a future that is done
            if output.copy_id != number:
                raise InvariantBroken(f"the runner completed copy {output.copy_id} as copy {number}")
        except BaseException as error:
            self._ended_badly(done, error)
            return
        self._bus.publish(
            SwapDone(
                copy_id=number,
                seconds=self._loop.time() - started,
                kv_nbytes=output.kv_nbytes,
                aux_nbytes=output.aux_nbytes,
            )
        )

    def _copy_overdue(self, number: int) -> None:
        self._fail(self._runner.overdue(f"copy {number}", self._step_deadline_s))

    # -- steps ------------------------------------------------------------------------------------

    def _launch(self, step: RunStep) -> None:
        self._steps.append((step.step_id, self._loop.time()))
        self._runner.launch(step).add_done_callback(partial(self._guarded, self._step_ended))
        if self._watchdog is None:
            self._set_watchdog(self._steps[0][1] + self._step_deadline_s)

    def _step_ended(self, done: asyncio.Future[StepOutput]) -> None:
        if self._stopped:
            # take the unused result or error, so that asyncio does not warn of it
            _ = done.cancelled() or done.exception()
            return
        step_id, _ = self._steps.popleft()
        self._ended_at = self._loop.time()
        try:
            output = done.result()  # of a future that is done
            if output.step_id != step_id:
                raise InvariantBroken(f"the runner completed step {output.step_id} before step {step_id}")
            if output.scores:
                self._output.take_scores(output.scores)
        except BaseException as error:
            # also where the future was cancelled: the engine cannot go on without the step
            self._bus.publish(StepFailed(step_id=step_id, problem=str(error)))
            self._ended_badly(done, error)
            return
        self._outputs[step_id] = output
        told = StepDone(step_id=step_id, tokens=output.tokens, counts=output.counts, own_drafts=output.own_drafts)
        self._bus.publish(told)

    def _set_watchdog(self, when: float) -> None:
        self._watchdog = DeadlineTimer(self._loop, when, partial(self._guarded, self._watch, when))

    def _watch(self, when: float) -> None:
        """One timer for all steps has rung, for the step that was due at `when`: is the oldest in flight overdue?"""
        self._watchdog = None
        if not self._steps:
            return
        step_id, launched = self._steps[0]
        # a step that waited for the one before it has had its time only since then
        due = max(launched, self._ended_at) + self._step_deadline_s
        if due > when:
            # another step, and the timer looks once more where the loop was blocked since that was launched
            self._set_watchdog(due)
        else:
            self._fail(self._runner.overdue(f"step {step_id}", self._step_deadline_s))

    def _ended_badly(self, done: asyncio.Future[Any], error: BaseException) -> None:
        """A step or a copy failed, or its answer did."""
        self._fail(error)
        if isinstance(error, INTERRUPTS) and (done.cancelled() or done.exception() is not error):
            # the task that an interrupt ended has raised it already
            raise error

    def _fail(self, error: BaseException) -> None:
        if self._stopped:
            return
        self.stop()
        # taps get every event up to the end, the failure included
        self._bus.feed_taps(self._bus.drain())
        self._on_failure(error)
