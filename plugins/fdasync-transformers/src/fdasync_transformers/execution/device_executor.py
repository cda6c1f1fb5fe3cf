"""Steps and copies on a GPU: `launch` queues work and returns; completions become futures.

A step is three stretches of device work. On the stream `compute`: the changes since the last step are sent, the model
runs (a graph replay for decodes), rows of the aux data are staged, tokens are sampled and written to where the next
step reads them. On the stream `results`: staged rows and sampled tokens go to held page-locked memory. Then an event:
the completion port makes a future of it, whose callback scatters the rows into the arena and reads the tokens. So a
step may be launched while the step before it runs, and nothing here waits for the device.

A sequence under a grammar needs a mask that depends on its last token. If that token is still on the device, the step
is queued in two parts: the model at once, and sampling when the step before has ended and the masks are made, which
takes the host less time than the model takes the device (docs/design.md, rule 38). Launches behind it wait for the
second part in their order.

Of a group, rank 0 samples, and each step ends with an exchange on the device that brings the tokens to all ranks
(`parallel/on_device.py`). How a step is computed follows from what all ranks know, so all make the same sums.

Knows no requests. Made by `bound_runner.py` once the model is loaded; one for each runner, used from its loop.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import torch
from fdasync_kernels.layout import scatter_updates

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.gpu import packed_copy as packed
from fdasync.gpu.block_copies import BlockCopies
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync.runner.prompt_scores import scored_runs
from fdasync_transformers.execution.begun_step import (
    AUX,
    OWN,
    OWN_SAMPLER,
    RANKS,
    RUNS,
    SAMPLER,
    SCORES,
    BegunStep,
    own,
)
from fdasync_transformers.execution.device_step import Passed, batch_arrays, device_batch
from fdasync_transformers.execution.drafts.device_drafts import DeviceDrafts
from fdasync_transformers.execution.drafts.own_drafts import OwnDrafts
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.graphs import GraphLadder
from fdasync_transformers.execution.mixed_graphs import MixedLadder
from fdasync_transformers.execution.states.device_states import DeviceStates
from fdasync_transformers.parallel.on_device import StepEnds
from fdasync_transformers.sampling.plan import MASKS
from fdasync_transformers.sampling.repeat import repeat_rows
from fdasync_transformers.sampling.sampler import compute_samples, plan_samples, read_samples
from fdasync_transformers.sampling.scoring import compute_scores, plan_scores, read_scores
from fdasync_transformers.sampling.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray

    from fdasync.gpu.completion import Hold
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.device_step import DeviceStepModel, Way
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.triton_paging import DeviceBatch
    from fdasync_transformers.sampling.sampler import SamplePlan
    from fdasync_transformers.sampling.scoring import ScorePlan

T = TypeVar("T")

# most bytes of keys and values that the tokens of chunks may read if each is computed as a decode: some 8 ms of an
# H200, where launching a step of 48 layers operation by operation takes ten times as long
_MOST_READ_NBYTES = 32 << 30
# longest context of a decode that is computed in tiles: one program reads all keys of a head, tile after tile
_MOST_TILED_TOKENS = 8192


class DeviceExecutor(Executor):
    """See the module and `Executor`.

    Attributes:
        graphs, run_graphs: of decode steps, and of decode steps with drafts; None before `capture_graphs`.
        flat_tokens: a step of at most so many tokens is computed as if each were a decode, which a graph can replay.
        model: the model that computes the steps.
        mixed: graphs of steps with prompts in them; None before `capture_mixed`.
    """

    def __init__(self, model: DeviceStepModel, bound: Bound, services: GpuServices) -> None:
        self.graphs: GraphLadder | None = None
        self.run_graphs: GraphLadder | None = None
        self.flat_tokens = 0
        self.mixed: MixedLadder | None = None
        self.model = model
        self._bound = bound
        self._services = services
        group = bound.collectives
        self._ends = None if group is None else StepEnds(group, services.streams.device)
        # of a group rank 0 alone samples, scores prompts, follows grammars and has the rows' arena
        self._leads = self._ends is None or self._ends.leads
        self._lanes = model.lanes_of(bound.table)
        # None: the model has no layers that draft
        self._own = None if model.mtp is None else OwnDrafts(model, bound, self._lanes)
        # None: no step has drafts
        self._drafts = DeviceDrafts(bound, self._lanes, own=self._own is not None) if bound.speculation else None
        self._failure = ""
        # the port's own future of the step launched last, which no caller can cancel: a step that cannot be launched
        # fails behind it
        self._last: asyncio.Future[Any] | None = None
        # a step whose second part waits for the step before it, and the launches behind it, in order
        self._unsampled: tuple[BegunStep, asyncio.Future[StepOutput]] | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        # weights, tables and buffers were written on the current stream
        services.streams.follow()
        # last: they pin pages until they are closed, and whoever made this cannot close it if it fails here
        self._copies: BlockCopies | None = None
        self._states: DeviceStates | None = None
        if bound.host is not None:
            self._copies = BlockCopies(
                bound.pool.blocks, bound.host, services.streams, services.events, services.port, bound.part
            )
        if model.states is not None and model.plan_size is not None:
            try:
                self._states = DeviceStates(model.states, model.plan_size, bound, services)
            except BaseException:
                if self._copies is not None:
                    self._copies.unpin()
                raise

    def capture_graphs(self, sizes: tuple[int, ...]) -> None:
        """Capture decode steps at these batch sizes, and check them. Blocks its loop.

        Where steps may have drafts, those without have graphs of their own, up to as many rows as sequences may run.

        Raises RuntimeError where a graph cannot hold what the model does, or computes other logits.
        """
        if self._drafts is not None:
            self.run_graphs = self._ladder(sizes, runs=True)
            sizes = self.lone_sizes(sizes, len(self._bound.table.length))
        self.graphs = self._ladder(sizes, runs=False)
        if self._own is not None:
            with self._services.streams.on("compute"):
                self._own.capture(self.lone_sizes(sizes, len(self._bound.table.length)), self._services.graph_memory)
                self._bound.pool.blocks[0].zero_()
        # the tokens of one sequence follow each other through recurrent layers
        self.flat_tokens = 0 if self.model.recurrent is not None else (self.run_graphs or self.graphs).sizes[-1]

    @staticmethod
    def lone_sizes(sizes: tuple[int, ...], running: int) -> tuple[int, ...]:
        """The sizes that steps need which decode up to so many sequences, one row each."""
        return sizes[: bisect.bisect_left(sizes, running) + 1]

    def _ladder(self, sizes: tuple[int, ...], *, runs: bool) -> GraphLadder:
        with self._services.streams.on("compute"):
            memory = self._services.graph_memory
            graphs = GraphLadder(self.model, self._lanes, self._bound.pool, sizes, memory, runs=runs)
            wrong = graphs.differing(self.model, self._lanes, self._bound.pool)
            if wrong:
                raise RuntimeError(f"the graph of {wrong} sequences does not answer as its operations do")
            # the check wrote to block 0
            self._bound.pool.blocks[0].zero_()
        return graphs

    def capture_mixed(self, sizes: tuple[int, ...], sequences: int) -> None:
        """Capture steps with prompts in them, of these numbers of tokens and at most `sequences` sequences, and check
        them. As `capture_graphs`."""
        with self._services.streams.on("compute"):
            memory = self._services.graph_memory
            mixed = MixedLadder(self.model, self._lanes, self._bound.pool, sizes, sequences, memory)
            wrong = mixed.differing() if self.on_gpu else 0
            if wrong:
                raise RuntimeError(f"the graph of {wrong} tokens does not answer as its operations do")
            self._bound.pool.blocks[0].zero_()
            self.mixed = mixed

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        start = partial(self._queue, future, lambda: self._start(step, future), step.step_id)
        if self._unsampled is not None:
            self._waiting.append(start)
        else:
            start()
        return future

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        future: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()
        self._queue(future, lambda: self._move(copy))
        return future

    async def aclose(self) -> None:
        """Wait for launched work, bounded: the futures of work that takes longer fail with an error that names it."""
        self._failure = self._failure or "the runner is closed"
        try:
            if self._copies is not None:
                await self._copies.aclose()
        finally:
            try:
                if self._states is not None:
                    await self._states.aclose()
            finally:
                await self._services.port.aclose()
                self.graphs = self.run_graphs = self.mixed = None

    @property
    def on_gpu(self) -> bool:
        """Whether the device has streams and graphs."""
        return self._services.streams.device.type == "cuda"

    @property
    def device_failed(self) -> bool:
        """Whether the device failed: it answers no more, and its memory is freed with the process."""
        return self._services.port.problem is not None

    def warm(self, max_step_tokens: int) -> None:
        """Page-lock the buffers that steps will need, and compile the kernels of their deltas and samples. Blocks its
        loop."""
        services, depth = self._services, 3
        largest = max_step_tokens * self._bound.aux.token_nbytes + (1 << 16)
        holds = []
        size = 1 << 12
        while size < 2 * largest:
            holds += [services.pinned.take(size) for _ in range(2 * depth)]
            size *= 2
        with services.streams.on("compute"):
            nothing = torch.full((1,), -1, dtype=torch.int64, device=services.streams.device)
            scatter_updates(self._lanes.flat, nothing, nothing.to(torch.int32))
            if self._drafts is not None:
                self._drafts.warm()
            if self._own is not None:
                self._own.warm()
            if self._states is not None:
                self._states.warm()
            if self._ends is not None:
                self._ends.queue(0, self._bound.aux.stage(0), None, None, 0)
            if self.on_gpu and self._leads:
                logits = torch.empty((0, self._bound.vocab_size), dtype=self.model.model.dtype)
                warm_up(self._bound.vocab_size, self._bound.trim(logits).dtype, self._lanes.tokens)
        for hold in holds:
            hold.release()

    # -- futures --------------------------------------------------------------------------------------

    def _queue(
        self, future: asyncio.Future[T], start: Callable[[], asyncio.Future[T] | None], step_id: int = -1
    ) -> None:
        """Call `start`, which queues the work of `future`, or will. It fails with RunnerError, and the runner with it.

        Steps end in the order of launch, also steps that could not be started.
        """
        try:
            if self._failure:
                raise RunnerError(f"nothing more after a failure: {self._failure}")
            inner = start()
        except Exception as error:  # a model may raise anything, and a step must still end
            failed = self._failed(error, step_id)
            if future.done():
                return
            if step_id < 0 or self._last is None or self._last.done():
                future.set_exception(failed)
            else:
                self._last.add_done_callback(lambda _: None if future.done() else future.set_exception(failed))
        else:
            if inner is not None:
                self._follow(inner, future, step_id)

    def _follow(self, inner: asyncio.Future[T], future: asyncio.Future[T], step_id: int) -> None:
        """End `future` with `inner`."""
        if step_id >= 0:
            self._last = inner
        inner.add_done_callback(partial(self._ended, future, step_id))

    def _ended(self, future: asyncio.Future[T], step_id: int, inner: asyncio.Future[T]) -> None:
        error = asyncio.CancelledError() if inner.cancelled() else inner.exception()
        if error is not None:
            failed = self._failed(error, step_id)
            if not future.done():
                future.set_exception(failed)
        elif not future.done():
            future.set_result(inner.result())  # of a future that is done

    def _failed(self, error: BaseException, step_id: int) -> RunnerError:
        """The error of this step or copy; from now on the runner takes no more work."""
        if isinstance(error, RunnerError):
            failed = RunnerError(error.problem, step_id)
        else:
            failed = RunnerError(f"{type(error).__name__}: {error}", step_id)
        failed.__cause__ = error
        self._failure = self._failure or failed.problem
        return failed

    # -- steps ----------------------------------------------------------------------------------------

    def _start(self, step: RunStep, future: asyncio.Future[StepOutput]) -> asyncio.Future[StepOutput] | None:
        """Queue a step; None: only what can be queued of it, and `_resume` queues the rest."""
        begun = self._begin(step)
        if begun.matchers is None or begun.matchers.is_ready:
            return self._sample(begun, self._kind(begun))
        # the buffers come back with what is queued; the second part has its own
        self._pass_on(begun.holds)
        self._completion(begun.holds, ("forward", len(begun.batch.positions)), lambda: None).add_done_callback(_seen)
        self._unsampled = (begun._replace(holds=[]), future)
        assert self._last is not None
        self._last.add_done_callback(self._resume)
        return None

    def _resume(self, before: asyncio.Future[Any]) -> None:
        """The step before has ended: queue the second part of the step behind it, then the launches that waited."""
        assert self._unsampled is not None
        (begun, future), self._unsampled = self._unsampled, None
        try:
            if before.cancelled() or before.exception() is not None or self._failure:
                raise RunnerError(f"nothing more after a failure: {self._failure or 'the step before it failed'}")
            if begun.matchers is not None and not begun.matchers.is_ready:
                raise InvariantBroken("a matcher lacks tokens of steps that have ended")
            # straight to the caller's future: by another one it would end behind a step that did not wait
            self._follow(self._sample(begun, ("sampled", len(begun.batch.sampled))), future, begun.batch.step_id)
        except Exception as error:  # a step must still end
            failed = self._failed(error, begun.batch.step_id)
            if not future.done():
                future.set_exception(failed)
        while self._waiting and self._unsampled is None:
            self._waiting.popleft()()

    def _begin(self, step: RunStep) -> BegunStep:
        """Queue a step up to its logits."""
        bound, services, lanes = self._bound, self._services, self._lanes
        drafted = None if self._drafts is None else self._drafts.plan(step)
        if drafted is not None:
            batch = drafted.rows
        elif step.drafts is not None:
            raise InvariantBroken(f"step {step.step_id} has drafts, and this runner verifies none")
        else:
            batch = bound.table.plan(step)
        if self._leads:
            bound.matchers.follow(step)
        total = len(batch.positions)
        index, values = lanes.deltas(step, bound.table)
        rows = (np.cumsum(batch.counts) - 1)[batch.sampled] if total else np.zeros(0, np.int64)
        plan = self._plan_samples(batch, rows, drafted) if self._leads else None
        scores = plan_scores(scored_runs(batch, bound.table))
        # graphs keep no hidden states: a step that scores is launched operation by operation
        way = self._way(batch) if scores is None else "both"
        scores = scores if self._leads else None
        arrays: dict[str, NDArray[np.generic]] = {}
        if len(index):
            arrays["delta_index"], arrays["delta_values"] = index, values
        if total:
            arrays.update(batch_arrays(batch, rows, way))
        states = None if self._states is None else self._states.plan(step, batch, drafted, arrays)
        if drafted is not None and len(rows):
            arrays.update({RUNS + name: array for name, array in DeviceDrafts.arrays(drafted).items()})
        elif drafted is None and len(batch.sampled):
            sampling = batch.lanes[batch.sampled]
            arrays["next_index"] = lanes.after(sampling, bound.table.length[sampling])
        if plan is not None:
            arrays.update({SAMPLER + name: array for name, array in plan.arrays.items()})
        own_plan = None
        if self._own is not None:
            arrays.update({OWN + name: array for name, array in self._own.arrays(step, drafted).items()})
            own_plan = self._own.plan(drafted)
            if own_plan is not None:
                arrays.update({OWN_SAMPLER + name: array for name, array in own_plan.arrays.items()})
        if scores is not None:
            arrays.update({SCORES + name: array for name, array in scores.arrays.items()})
        runs = drafted is not None and bool((drafted.widths > 1).any())
        holds: list[Hold] = []
        sent: dict[str, torch.Tensor] = {}
        results: dict[str, torch.Tensor] = {}
        passed = placed = None
        try:
            with services.streams.on("compute"):
                if arrays:
                    sent, hold = packed.send(arrays, services.pinned, services.streams.device)
                    holds.append(hold)
                    if len(index):
                        scatter_updates(lanes.flat, sent["delta_index"], sent["delta_values"])
                    if self._drafts is not None and drafted is not None and len(rows):
                        placed = self._drafts.place(drafted, own(sent, RUNS), sent, sent.get(SAMPLER + "floats"))
                    if self._own is not None:
                        self._own.enter(own(sent, OWN))
                    sequences = None
                    if self._states is not None and states is not None:
                        self._states.begin(states, sent)
                        sequences = states.sequences
                    if total:
                        shape = device_batch(
                            batch, sent, way, runs=runs, size=self.model.plan_size, sequences=sequences
                        )
                        passed, results = self._compute(batch, scores, sent, way, shape)
        except Exception:
            self._abandon(holds, results)
            raise
        matchers = None if plan is None else bound.matchers.of(batch.lanes[batch.sampled])
        return BegunStep(batch, way, plan, scores, matchers, sent, passed, results, holds, drafted, placed, own_plan)

    @staticmethod
    def _kind(begun: BegunStep) -> Hashable:
        """Steps of one kind take alike."""
        total = len(begun.batch.positions)
        if begun.scores is not None:
            return ("scored", total // 256)
        return ("decode", total) if begun.way == "decodes" else ("mixed", total // 256)

    def _sample(self, begun: BegunStep, kind: Hashable) -> asyncio.Future[StepOutput]:
        """Queue sampling and the way of the results to the host."""
        services, plan, results, holds = self._services, begun.plan, begun.results, begun.holds
        batch, tokens = begun.batch, None
        logits = None if begun.passed is None else begun.passed.logits
        fetched: dict[str, NDArray[np.generic]] = {}
        try:
            with services.streams.on("compute"):
                if plan is not None and logits is not None:
                    numbers = own(begun.sent, SAMPLER)
                    if begun.matchers is not None:
                        masks, hold = packed.send(
                            {MASKS: begun.matchers.masks()}, services.pinned, services.streams.device
                        )
                        holds.append(hold)
                        numbers.update(masks)
                    sampled = compute_samples(self._bound.trim(logits), plan, numbers, self._lanes.tokens)
                    tokens = sampled["tokens"]
                    results.update({SAMPLER + name: tensor for name, tensor in sampled.items()})
                if self._ends is not None and len(batch.positions):
                    count = len(batch.sampled)
                    padding = None if begun.placed is None else begun.sent["lanes"][: batch.num_decodes] < 0
                    told = self._ends.queue(batch.step_id, own(results, AUX), logits, tokens, count, padding)
                    tokens = self._ends.tokens(told, count) if count else None
                    if not self._leads:
                        results.clear()
                    results[RANKS] = told
                if self._drafts is not None and begun.placed is not None and tokens is not None:
                    runs = self._drafts.accept(begun.placed, own(begun.sent, RUNS), tokens.long())
                    results.update({RUNS + name: tensor for name, tensor in runs.items()})
                    if self._states is not None:
                        decodes = len(begun.placed.starts)
                        self._states.settle(begun.sent[RUNS + "runs"], decodes, runs, begun.sent)
                elif tokens is not None:
                    scatter_updates(self._lanes.flat, begun.sent["next_index"], tokens.to(torch.int32))
                if self._own is not None and begun.passed is not None:
                    self._draft(self._own, begun, begun.passed)
            self._pass_on(holds)
            with services.streams.on("results"):
                if results:
                    fetched, buffer = packed.fetch(results, services.pinned)
                    holds.append(buffer)
        except Exception:
            self._abandon(holds, results)
            raise
        # the callback keeps the device's tensors until the copies on the other stream have read them
        return self._completion(holds, kind, lambda: self._finish(begun, fetched))

    @staticmethod
    def _draft(drafter: OwnDrafts, begun: BegunStep, passed: Passed) -> None:
        """Queue what the model's own layers do behind a step: they draft for the next one."""
        batch = device_batch(begun.batch, begun.sent, begun.way)
        drafter.keep(passed, batch, begun.batch.num_decodes if begun.placed is not None else 0)
        if begun.drafted is not None:
            most = begun.drafted.own_drafts
            drafter.draft(most, own(begun.sent, OWN), begun.own_plan, own(begun.sent, OWN_SAMPLER))

    def _abandon(self, holds: list[Hold], results: dict[str, torch.Tensor]) -> None:
        """A step broke: the queued part runs on, and its buffers and tensors come back with a completion, for which a
        close waits."""
        self._completion(holds, ("broken",), results.clear).add_done_callback(_seen)

    def _way(self, batch: Batch) -> Way:
        """How the tokens of a step attend: in a way that a graph replays, where possible."""
        total, decodes = len(batch.positions), batch.num_decodes
        if total == decodes:
            return "decodes"
        read = (batch.positions[decodes:] + 1).sum() * self.model.layout.held_token_nbytes
        if total <= self.flat_tokens and int(read) <= _MOST_READ_NBYTES:
            return "decodes"
        mixed = self.mixed
        fits = mixed is not None and mixed.size_of(total, len(batch.lanes)) > 0
        short = not decodes or int(batch.positions[:decodes].max()) < _MOST_TILED_TOKENS
        return "tiles" if fits and short else "both"

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
        if kind == ("broken",):
            self._pass_on(holds)
        copied = services.events.take()
        holds.append(copied)
        services.streams.record("results", copied.event)
        return services.port.completion(copied.event, lane="compute", kind=kind, holds=holds, on_done=on_done)

    def _compute(
        self,
        batch: Batch,
        scores: ScorePlan | None,
        sent: dict[str, torch.Tensor],
        way: Way,
        shape: DeviceBatch,
    ) -> tuple[Passed, dict[str, torch.Tensor]]:
        """Queue forward pass and scores of prompts; returns the pass, and the tensors that go to the host. `runs`: a
        sequence has several rows that decode."""
        bound, lanes = self._bound, self._lanes
        total = len(batch.positions)
        passed = None
        scored: dict[str, torch.Tensor] = {}
        if self.mixed is not None and way == "tiles":
            passed = self.mixed.replay(sent, total)
        elif way == "decodes":
            for ladder in (None if shape.runs else self.graphs, self.run_graphs):
                if passed is None and ladder is not None:
                    passed = ladder.replay(sent["lanes"], sent["starts"], sent.get("spans"), sent.get("owners"))
            if passed is not None and "rows" in sent:
                passed = Passed(passed.logits.index_select(0, sent["rows"]), passed.states)
        if scores is not None:
            head = self.model.head
            with head.keeping():
                passed = self.model.forward(shape, lanes, bound.pool)
                scored = compute_scores(lambda rows: bound.trim(head.logits(rows)), scores, own(sent, SCORES))
        if passed is None:
            passed = self.model.forward(shape, lanes, bound.pool)
        results = {SCORES + name: tensor for name, tensor in scored.items()}
        results.update({AUX + name: tensor for name, tensor in bound.aux.stage(total).items()})
        return passed, results

    def _plan_samples(self, batch: Batch, rows: NDArray[np.int64], drafted: StepRows | None) -> SamplePlan | None:
        """`rows`: of the step, whose logits are sampled from. Rows of one sequence are planned once."""
        if not len(rows):
            return None
        table = self._bound.table
        lanes, positions = batch.lanes[batch.sampled], batch.positions[rows] + 1
        # the device draws the noise of positions that the host does not know
        undrawn = 0
        times = None
        if drafted is not None:
            widths = drafted.widths[drafted.widths > 0]
            undrawn = len(widths)
            times = np.concatenate([widths, np.ones(len(rows) - batch.num_decodes, np.int64)])
            first = np.cumsum(times) - times
            lanes, positions = lanes[first], positions[first]
        specs = [spec for lane in lanes.tolist() if (spec := table.samplers[lane]) is not None]
        plan = plan_samples(specs, positions, lanes, undrawn=undrawn)
        return plan if times is None else repeat_rows(plan, times)

    def _finish(self, begun: BegunStep, fetched: dict[str, NDArray[np.generic]]) -> StepOutput:
        """After the device is done: scatter the rows into their slots, and make the step's output of the tokens."""
        batch = begun.batch
        begun.results.clear()
        aux, arena = self._bound.aux, self._bound.arena
        settled = None
        if self._drafts is not None and begun.drafted is not None:
            settled = self._drafts.settle(begun.drafted, own(fetched, RUNS))
        chosen = None if settled is None else settled.samples
        output = StepOutput(batch.step_id, ())
        if self._ends is not None and RANKS in fetched:
            told: Any = fetched[RANKS]
            # in host memory, as all that was fetched
            tokens = self._ends.read(told, batch.step_id, len(batch.sampled))
            output = StepOutput(batch.step_id, tuple((tokens if chosen is None else tokens[chosen]).tolist()))
        if arena is not None and len(batch.positions):
            rows = own(fetched, AUX)
            if settled is not None:
                rows = {name: values[settled.stands] for name, values in rows.items()}
            where = batch if settled is None else settled
            arena.scatter(where.aux_index, where.generations, aux.read(rows, where.positions))
        if begun.plan is not None:
            output = read_samples(begun.plan, own(fetched, SAMPLER), chosen).step_output(batch.step_id)
        if begun.matchers is not None:
            # a sequence under a grammar has one row or none; in host memory
            sampled = fetched[SAMPLER + "tokens"].tolist()
            output = msgspec.structs.replace(output, problems=begun.matchers.accept(sampled))
        if settled is not None:
            drafts = None if self._own is None else settled.own_drafts
            output = msgspec.structs.replace(output, counts=settled.counts, own_drafts=drafts)
        if begun.scores is not None:
            output = msgspec.structs.replace(output, scores=read_scores(begun.scores, own(fetched, SCORES)))
        return output

    # -- copies ---------------------------------------------------------------------------------------

    def _move(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Queue a copy of blocks; rows stay in their slots."""
        if copy.snapshots:
            if self._states is None:
                raise InvariantBroken("a copy of snapshots, and the model has no recurrent layers")
            inner = self._states.move(copy)
        elif self._copies is None:
            raise InvariantBroken("a copy, and there is no host tier")
        elif isinstance(copy, SwapOut):
            inner = self._copies.out(copy.device, copy.host)
        else:
            inner = self._copies.back(copy.host, copy.device)
            self._bound.table.place(copy.device, copy.slots, copy.generations)
        future: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()

        def copied(done: asyncio.Future[int]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(CopyOutput(copy.copy_id, done.result(), 0))  # of a future that is done

        inner.add_done_callback(copied)
        return future


def _seen(future: asyncio.Future[Any]) -> None:
    """Mark the error as seen: the caller gets the error that broke the step."""
    if not future.cancelled():
        future.exception()
