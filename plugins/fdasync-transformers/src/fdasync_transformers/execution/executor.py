"""Steps and copies of a runner: `launch` queues work and returns; completions become futures.

A step is three stretches of device work. On the stream `compute`: its arrays are sent, and the model runs (a graph
replay for decodes). The parts of the step (`parts/`) queue their work in front of the model's and behind it: they stage
rows, sample tokens, and write these to where the next step reads them. On the stream `results`: what the host is to
read goes to held page-locked memory. Then an event: the completion port makes a future of it, whose callback has the
parts read. So a step may be launched while the step before it runs, and nothing here waits for the device. On a CPU
what is queued is done at once: a launch blocks its loop for as long as the model computes, and belongs in a worker.

A part may not be ready for what follows the pass: a mask of a grammar depends on the sequence's last token. If that
token is still on the device, the step is queued in two parts: the model at once, and the rest when the step before has
ended, which takes the host less time than the model takes the device (docs/design.md, rule 38). Launches behind it wait
for the second part in their order.

Of a group, how a step is computed follows from what all ranks know, so all make the same sums.

Knows no requests, and no part by its name. Made by `bound_runner.py` once the model is loaded; one for each runner,
used from its loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.gpu.completion import when_done
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync_transformers.execution.copies import DeviceCopies
from fdasync_transformers.execution.flights import Flights
from fdasync_transformers.execution.parts.make import make_parts
from fdasync_transformers.execution.passes import Passes, lone_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.gpu.completion import Hold
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.parts.step_part import Arrays, StepWork
    from fdasync_transformers.execution.step import StepModel

T = TypeVar("T")

# of steps in flight
_DEPTH = 3
# largest buffer that is page-locked at the start: a step with larger ones takes long anyway
_MOST_WARM_NBYTES = 32 << 20


class Executor:
    """See the module; `Runner.launch` and `Runner.copy` say what its futures promise.

    Attributes:
        model: the model that computes the steps.
        passes: how it computes them, with their graphs.
    """

    def __init__(self, model: StepModel, bound: Bound, services: GpuServices) -> None:
        self.model = model
        self._bound = bound
        self._services = services
        lanes = model.lanes_of(bound.table)
        self.passes = Passes(model, lanes, bound.pool, services.graph_memory)
        self._rows, self._parts = make_parts(model, bound, lanes, services)
        self._flights = Flights()
        # a step whose second part waits for the step before it, and the launches behind it, in order
        self._unsampled: tuple[StepWork, asyncio.Future[StepOutput]] | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        # weights, tables and buffers were written on the current stream
        services.streams.follow()
        # last: copies pin pages until they are closed, and nobody can close an executor that was not made
        self._copies = DeviceCopies(bound, model.states, services)

    def capture_graphs(self, sizes: tuple[int, ...]) -> None:
        """Capture decode steps at these batch sizes, and check them. Blocks its loop.

        Where steps may have drafts, those without have graphs of their own, up to as many rows as sequences may run.

        Raises RuntimeError where a graph cannot hold what the model does, or computes other logits.
        """
        running = len(self._bound.table.length)
        with self._services.streams.on("compute"):
            self.passes.capture(sizes, lone_sizes(sizes, running) if self._bound.speculation else None)
            for part in self._parts:
                part.capture(lone_sizes(sizes, running))
            # the checks wrote to block 0
            self._bound.pool.blocks[0].zero_()

    def capture_mixed(self, sizes: tuple[int, ...], sequences: int) -> None:
        """Capture steps with prompts in them, of these numbers of tokens and at most `sequences` sequences, and check
        them. As `capture_graphs`."""
        with self._services.streams.on("compute"):
            self.passes.capture_mixed(sizes, sequences, checks=self.on_gpu)
            self._bound.pool.blocks[0].zero_()

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """Start a step. Never raises: a failure ends the future, and those of all launches behind it; a step that was
        under way by then ends as it ends."""
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        start = partial(self._flights.begin, future, lambda: self._start(step, future), step.step_id)
        if self._unsampled is not None:
            self._waiting.append(start)
        else:
            start()
        return future

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Start a copy. Never raises: a failure ends the future, and every later one."""
        future: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()
        self._flights.begin(future, lambda: self._move(copy))
        return future

    async def aclose(self) -> None:
        """Wait for the work that is queued, bounded: the futures of work that takes longer fail with an error that
        names it, and so do those of launches that wait for a step before them."""
        self._flights.problem = self._flights.problem or "the runner is closed"
        try:
            await self._copies.aclose()
        finally:
            await self._services.port.aclose()
            self.passes.drop()

    @property
    def on_gpu(self) -> bool:
        """Whether the device has streams and graphs."""
        return self._services.streams.device.type == "cuda"

    @property
    def device_failed(self) -> bool:
        """Whether the device failed: it answers no more, and its memory is freed with the process."""
        return self._services.port.problem is not None

    def warm(self, max_step_tokens: int) -> None:
        """Page-lock the buffers that steps will need, and compile the kernels of their parts. Blocks its loop."""
        services = self._services
        holds = []
        if self.on_gpu:
            largest = min(max_step_tokens * self._bound.aux.token_nbytes + (1 << 16), _MOST_WARM_NBYTES)
            size = 1 << 12
            while size < 2 * largest:
                holds += [services.pinned.take(size) for _ in range(2 * _DEPTH)]
                size *= 2
        with services.streams.on("compute"):
            for part in self._parts:
                part.warm()
        for hold in holds:
            hold.release()

    # -- steps ----------------------------------------------------------------------------------------

    def _start(self, step: RunStep, future: asyncio.Future[StepOutput]) -> asyncio.Future[StepOutput] | None:
        """Queue a step; None: only what can be queued of it, and `_resume` queues the rest."""
        work = self._begin(step)
        if work.is_ready:
            return self._end(work, self.passes.kind(work))
        before = self._flights.last
        if before is None:
            self._abandon(work)
            raise InvariantBroken("a part of the first step is not ready, and waits for none before it")
        # the buffers come back with what is queued; the second part has its own
        self._pass_on(work.holds)
        self._completion(work.holds, ("forward", work.total), lambda: None).add_done_callback(_seen)
        work.holds = []
        self._unsampled = (work, future)
        before.add_done_callback(self._resume)
        return None

    def _resume(self, before: asyncio.Future[Any]) -> None:
        """The step before has ended: queue the second part of the step behind it, then the launches that waited."""
        assert self._unsampled is not None
        (work, future), self._unsampled = self._unsampled, None
        try:
            if before.cancelled() or before.exception() is not None or self._flights.problem:
                problem = self._flights.problem or "the step before it failed"
                raise RunnerError(f"nothing more after a failure: {problem}")
            if not work.is_ready:
                raise InvariantBroken("a step waits for more than the step before it")
            # straight to the caller's future: by another one it would end behind a step that did not wait
            self._flights.follow(self._end(work, ("sampled", len(work.rows))), future, work.step.step_id)
        except Exception as error:  # a step must still end
            failed = self._flights.failed(error, work.step.step_id)
            if not future.done():
                future.set_exception(failed)
        while self._waiting and self._unsampled is None:
            self._waiting.popleft()()

    def _begin(self, step: RunStep) -> StepWork:
        """Queue a step up to what its pass leaves."""
        services = self._services
        work = self._rows.begin(step)
        arrays: Arrays = {}
        for part in self._parts:
            if (planned := part.plan(work)) is not None:
                work.parts.append(planned)
                arrays.update({f"{part.name}.{name}": array for name, array in planned.arrays.items()})
        arrays.update(self.passes.plan(work))
        try:
            with services.streams.on("compute"):
                if arrays:
                    work.sent = services.send(arrays, work.holds)
                for own in work.parts:
                    own.sent = {name: work.sent[f"{own.part.name}.{name}"] for name in own.arrays}
                    own.part.before(work, own)
                if work.total:
                    with self.passes.keeping(work):
                        work.passed = self.passes.compute(work)
                        for own in work.parts:
                            own.results.update(own.part.passed(work, own))
        except Exception:
            self._abandon(work)
            raise
        return work

    def _end(self, work: StepWork, kind: Hashable) -> asyncio.Future[StepOutput]:
        """Queue what follows the pass, and the way of the results to the host."""
        services = self._services
        fetched: dict[str, NDArray[np.generic]] = {}
        try:
            with services.streams.on("compute"):
                for own in work.parts:
                    own.results.update(own.part.after(work, own))
            self._pass_on(work.holds)
            results = {f"{own.part.name}.{name}": value for own in work.parts for name, value in own.results.items()}
            with services.streams.on("results"):
                if results:
                    fetched = services.fetch(results, work.holds)
        except Exception:
            self._abandon(work)
            raise
        # the callback keeps the device's tensors until the copies on the other stream have read them
        return self._completion(work.holds, kind, lambda: self._read(work, fetched))

    @staticmethod
    def _read(work: StepWork, fetched: dict[str, NDArray[np.generic]]) -> StepOutput:
        """The device is done."""
        output = StepOutput(work.step.step_id, ())
        for own in reversed(work.parts):
            results = {name: fetched[f"{own.part.name}.{name}"] for name in own.results}
            own.results.clear()
            output = own.part.read(work, own, results, output)
        return output

    def _abandon(self, work: StepWork) -> None:
        """A step broke: the queued part runs on, and its buffers and tensors come back with a completion, for which a
        close waits."""
        self._pass_on(work.holds)
        self._completion(work.holds, ("broken",), work.parts.clear).add_done_callback(_seen)

    def _pass_on(self, holds: list[Hold]) -> None:
        """Make later work on `results` wait for all work queued on `compute`."""
        streams = self._services.streams
        computed = self._services.events.take()
        holds.append(computed)
        streams.record("compute", computed.event)
        streams.wait("results", computed.event)

    def _completion(self, holds: list[Hold], kind: Hashable, on_done: Callable[[], T]) -> asyncio.Future[T]:
        """The future of all work queued on `results`, and on `compute` before `_pass_on`."""
        services = self._services
        copied = services.events.take()
        holds.append(copied)
        services.streams.record("results", copied.event)
        return services.port.completion(copied.event, lane="compute", kind=kind, holds=holds, on_done=on_done)

    # -- copies ---------------------------------------------------------------------------------------

    def _move(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Queue a copy; rows stay in their slots."""
        inner = self._copies.move(copy)
        future: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()

        def copied(done: asyncio.Future[int]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(CopyOutput(copy.copy_id, done.result(), 0))  # of a future that is done

        when_done(inner, copied)
        return future


def _seen(future: asyncio.Future[Any]) -> None:
    """Mark the error as seen: the caller gets the error that broke the step."""
    if not future.cancelled():
        future.exception()
