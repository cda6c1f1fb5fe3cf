"""Steps and copies on a GPU: `launch` queues work and returns; completions become futures.

A step is three stretches of device work. On `compute`: what changed is sent, the model runs (a graph replay for
decodes), rows of the capture buffer are staged, tokens are sampled and written to where the next step reads them. On
`results`: staged rows and sampled tokens go to leased page-locked memory. Then an event: the completion port makes
it a future, whose callback scatters the rows into the arena and reads the tokens. So a step may be launched while
the one before it runs, and nothing here waits for the device.

Knows no requests. Made by `runner.py` once the model is there; one for each runner, used from its loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.gpu import packed_copy as packed
from fdasync.gpu.block_copies import BlockCopies
from fdasync.gpu.kernels.layout import scatter_updates
from fdasync.runner.base import CopyOutput, StepOutput
from fdasync_transformers.device_lanes import DeviceLanes
from fdasync_transformers.device_step import batch_arrays, device_batch
from fdasync_transformers.executor import Executor, step_output
from fdasync_transformers.graphs import GraphLadder
from fdasync_transformers.mixed_graphs import MixedLadder
from fdasync_transformers.sampler import compute_samples, plan_samples, read_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.device_step import DeviceStepModel, Way
    from fdasync_transformers.executor import Bound
    from fdasync_transformers.gpu_services import GpuServices
    from fdasync_transformers.sampler import SamplePlan

T = TypeVar("T")

# of keys and values that chunks may read once for each of their tokens to be computed as decodes: some 8 ms of an H200,
# where launching a step of 48 layers operation by operation takes ten times as long
_MOST_READ_NBYTES = 32 << 30
# of the context of a decode that is computed in tiles: one program reads all of a head's, one key tile after the other
_MOST_TILED_TOKENS = 8192
# what is the sampler's, among the arrays of a step
_SAMPLER = "sampler."


class DeviceExecutor(Executor):
    """See the module and `Executor`.

    Attributes:
        graphs: of decode steps; None where there are none.
        flat_tokens: a step of no more tokens is computed as if each were a decode, which a graph can replay.
        model: whose steps these are.
        mixed: graphs of steps with prompts in them; None where there are none.
    """

    def __init__(self, model: DeviceStepModel, bound: Bound, services: GpuServices) -> None:
        self.graphs: GraphLadder | None = None
        self.flat_tokens = 0
        self.mixed: MixedLadder | None = None
        self.model = model
        self._bound = bound
        self._services = services
        self._lanes = DeviceLanes(bound.table, services.streams.device)
        self._failure = ""
        #: the step launched last, for nobody to cancel: those that cannot be launched fail behind it
        self._last: asyncio.Future[Any] | None = None
        # weights, tables and buffers were written on the stream that is current
        services.streams.follow()
        # last: it pins pages, which only a close gives back
        self._copies = (
            None
            if bound.host is None
            else BlockCopies(bound.pool.blocks, bound.host, services.streams, services.events, services.port)
        )

    def capture_graphs(self, sizes: tuple[int, ...]) -> None:
        """Capture decode steps at these batch sizes, and check them. Blocks its loop.

        Raises RuntimeError where the model does what a graph cannot hold, or answers otherwise from one.
        """
        with self._services.streams.on("compute"):
            graphs = GraphLadder(self.model, self._lanes, self._bound.pool, sizes)
            wrong = graphs.differing(self.model, self._lanes, self._bound.pool)
            if wrong:
                raise RuntimeError(f"the graph of {wrong} sequences does not answer as its operations do")
            # a block that was written to is as new again
            self._bound.pool.blocks[0].zero_()
            self.graphs = graphs
            self.flat_tokens = graphs.sizes[-1]

    def capture_mixed(self, sizes: tuple[int, ...], sequences: int) -> None:
        """Capture steps with prompts in them, of so many tokens and at most so many sequences, and check them. As
        `capture_graphs`."""
        with self._services.streams.on("compute"):
            mixed = MixedLadder(self.model, self._lanes, self._bound.pool, sizes, sequences)
            wrong = mixed.differing() if self.on_gpu else 0
            if wrong:
                raise RuntimeError(f"the graph of {wrong} tokens does not answer as its operations do")
            self._bound.pool.blocks[0].zero_()
            self.mixed = mixed

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        return self._queue(lambda: self._start(step), step.step_id)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        return self._queue(lambda: self._move(copy))

    async def aclose(self) -> None:
        """Bounded: what the device does not end in time is named in the error of whoever waits for it."""
        self._failure = self._failure or "the runner is closed"
        try:
            if self._copies is not None:
                await self._copies.aclose()
        finally:
            await self._services.port.aclose()
            self.graphs = self.mixed = None

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams and graphs."""
        return self._services.streams.device.type == "cuda"

    @property
    def device_failed(self) -> bool:
        """The device answers no more; what it holds goes with the process."""
        return self._services.port.problem is not None

    def warm(self, max_step_tokens: int) -> None:
        """Page-lock the buffers that steps will need and compile what sends their deltas. Blocks its loop."""
        services, depth = self._services, 3
        largest = max_step_tokens * (0 if self._bound.capture is None else self._bound.capture.token_nbytes) + (1 << 16)
        leases = []
        size = 1 << 12
        while size < 2 * largest:
            leases += [services.pinned.take(size) for _ in range(2 * depth)]
            size *= 2
        with services.streams.on("compute"):
            nothing = torch.full((1,), -1, dtype=torch.int64, device=services.streams.device)
            scatter_updates(self._lanes.flat, nothing, nothing.to(torch.int32))
        for lease in leases:
            lease.release()

    # -- futures --------------------------------------------------------------------------------------

    def _queue(self, start: Callable[[], asyncio.Future[T]], step_id: int = -1) -> asyncio.Future[T]:
        """What `start` queued, as a future that fails with RunnerError and fails the runner with it.

        Steps end in the order of launch, also those that could not be started.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            if self._failure:
                raise RunnerError(f"nothing more after a failure: {self._failure}")
            inner = start()
        except Exception as error:  # a model may raise anything, and a step must still end
            failed = self._failed(error, step_id)
            if step_id < 0 or self._last is None or self._last.done():
                future.set_exception(failed)
            else:
                self._last.add_done_callback(lambda _: None if future.done() else future.set_exception(failed))
        else:
            if step_id >= 0:
                self._last = inner
            inner.add_done_callback(partial(self._ended, future, step_id))
        return future

    def _ended(self, future: asyncio.Future[T], step_id: int, inner: asyncio.Future[T]) -> None:
        error = asyncio.CancelledError() if inner.cancelled() else inner.exception()
        if error is not None:
            failed = self._failed(error, step_id)
            if not future.done():
                future.set_exception(failed)
        elif not future.done():
            future.set_result(inner.result())  # of one that is done

    def _failed(self, error: BaseException, step_id: int) -> RunnerError:
        """The error of this step or copy; from now on the runner takes no more."""
        if isinstance(error, RunnerError):
            failed = RunnerError(error.problem, step_id)
        else:
            failed = RunnerError(f"{type(error).__name__}: {error}", step_id)
        failed.__cause__ = error
        self._failure = self._failure or failed.problem
        return failed

    # -- steps ----------------------------------------------------------------------------------------

    def _start(self, step: RunStep) -> asyncio.Future[StepOutput]:
        bound, services, lanes = self._bound, self._services, self._lanes
        batch = bound.table.plan(step)
        total = len(batch.positions)
        index, values = lanes.deltas(step, bound.table)
        rows = (np.cumsum(batch.counts) - 1)[batch.sampled] if total else np.zeros(0, np.int64)
        plan = self._plan_samples(batch)
        way = self._way(batch)
        arrays: dict[str, NDArray[np.generic]] = {}
        if len(index):
            arrays["delta_index"], arrays["delta_values"] = index, values
        if total:
            arrays.update(batch_arrays(batch, rows, way))
        if plan is not None:
            sampling = batch.lanes[batch.sampled]
            arrays["next_index"] = lanes.after(sampling, bound.table.length[sampling])
            arrays.update({_SAMPLER + name: array for name, array in plan.arrays.items()})
        leases: list[Any] = []
        results: dict[str, torch.Tensor] = {}
        fetched: dict[str, NDArray[np.generic]] = {}
        try:
            with services.streams.on("compute"):
                if arrays:
                    sent, lease = packed.send(arrays, services.pinned, services.streams.device)
                    leases.append(lease)
                    if len(index):
                        scatter_updates(lanes.flat, sent["delta_index"], sent["delta_values"])
                    if total:
                        results = self._compute(batch, plan, sent, way)
            self._pass_on(leases)
            with services.streams.on("results"):
                if results:
                    fetched, buffer = packed.fetch(results, services.pinned)
                    leases.append(buffer)
        except Exception:
            # what was queued runs on: its buffers and tensors come back, and a close waits, as for any other
            self._completion(leases, ("broken",), results.clear).add_done_callback(_seen)
            raise
        kind: Hashable = ("decode", total) if way == "decodes" else ("mixed", total // 256)
        # what reads the device's tensors on another stream keeps them until it was done
        return self._completion(leases, kind, lambda: self._finish(batch, plan, fetched, results))

    def _way(self, batch: Batch) -> Way:
        """How the tokens of a step attend: as a graph can replay them, where one can."""
        total, decodes = len(batch.positions), batch.num_decodes
        if total == decodes:
            return "decodes"
        read = (batch.positions[decodes:] + 1).sum() * self.model.layout.token_nbytes
        if total <= self.flat_tokens and int(read) <= _MOST_READ_NBYTES:
            return "decodes"
        mixed = self.mixed
        fits = mixed is not None and mixed.size_of(total, len(batch.lanes)) > 0
        short = not decodes or int(batch.positions[:decodes].max()) < _MOST_TILED_TOKENS
        return "tiles" if fits and short else "both"

    def _pass_on(self, leases: list[Any]) -> None:
        """What follows on `results` waits for all that was queued on `compute`."""
        streams = self._services.streams
        computed = self._services.events.take()
        leases.append(computed)
        streams.record("compute", computed.event)
        streams.wait("results", computed.event)

    def _completion(self, leases: list[Any], kind: Hashable, on_done: Callable[[], T]) -> asyncio.Future[T]:
        """A future of the end of all that was queued on `results`, and before `_pass_on` on `compute`."""
        services = self._services
        if kind == ("broken",):
            self._pass_on(leases)
        copied = services.events.take()
        leases.append(copied)
        services.streams.record("results", copied.event)
        return services.port.completion(copied.event, lane="compute", kind=kind, leases=leases, on_done=on_done)

    def _compute(
        self, batch: Batch, plan: SamplePlan | None, sent: dict[str, torch.Tensor], way: Way
    ) -> dict[str, torch.Tensor]:
        """Queue forward pass and sampling; what of it the host wants."""
        bound, lanes = self._bound, self._lanes
        total = len(batch.positions)
        logits = None
        if self.mixed is not None and way == "tiles":
            logits = self.mixed.replay(sent, total)
        elif self.graphs is not None and way == "decodes":
            logits = self.graphs.replay(sent["lanes"], sent["starts"])
            if logits is not None and "rows" in sent:
                logits = logits.index_select(0, sent["rows"])
        if logits is None:
            logits = self.model.forward(device_batch(batch, sent, way), lanes, bound.pool)
        results: dict[str, torch.Tensor] = {}
        if bound.capture is not None:
            results["routing"] = bound.capture.stage(total)
        if plan is not None:
            logits = logits[:, : bound.vocab_size].to(getattr(torch, bound.logits_dtype))
            sampled = compute_samples(logits, plan, _own(sent), lanes.tokens)
            scatter_updates(lanes.flat, sent["next_index"], sampled["tokens"].to(torch.int32))
            results.update({_SAMPLER + name: tensor for name, tensor in sampled.items()})
        return results

    def _plan_samples(self, batch: Batch) -> SamplePlan | None:
        if not len(batch.sampled):
            return None
        table = self._bound.table
        lanes = batch.lanes[batch.sampled]
        specs = [spec for lane in lanes.tolist() if (spec := table.samplers[lane]) is not None]
        return plan_samples(specs, table.length[lanes], lanes)

    def _finish(
        self,
        batch: Batch,
        plan: SamplePlan | None,
        fetched: dict[str, NDArray[np.generic]],
        results: dict[str, torch.Tensor],
    ) -> StepOutput:
        """The device is done: rows to their slots, tokens to whoever waits."""
        results.clear()
        capture, arena = self._bound.capture, self._bound.arena
        if capture is not None and arena is not None and len(batch.positions):
            rows = fetched["routing"].view(capture.layers.spec.dtype)
            capture.check(rows, batch.positions)
            arena.scatter(batch.aux_index, batch.generations, {"routing": rows})
        if plan is None:
            return StepOutput(batch.step_id, ())
        return step_output(batch.step_id, read_samples(plan, _own(fetched)))

    # -- copies ---------------------------------------------------------------------------------------

    def _move(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Rows stay in their slots: a copy moves none."""
        if self._copies is None:
            raise InvariantBroken("a copy, and there is no host tier")
        if isinstance(copy, SwapOut):
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
                future.set_result(CopyOutput(copy.copy_id, done.result(), 0))  # of one that is done

        inner.add_done_callback(copied)
        return future


def _own(arrays: Mapping[str, T]) -> dict[str, T]:
    """The sampler's arrays, by the names that it gave them."""
    return {name.removeprefix(_SAMPLER): array for name, array in arrays.items() if name.startswith(_SAMPLER)}


def _seen(future: asyncio.Future[Any]) -> None:
    """Whoever waits learns of the error elsewhere."""
    if not future.cancelled():
        future.exception()
