"""Binds memory to an opened runner: allocates its blocks, attaches what records, makes and warms the executor.

Knows models by their steps; knows no requests. Called by `runner.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fdasync.cache.host_arena import HostPart
from fdasync.errors import ConfigError, InvariantBroken, RunnerError
from fdasync.runner.input_batch import InputBatch
from fdasync_transformers.execution.bound import Bound
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.graphs import decode_rows, ladder
from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers
from fdasync_transformers.execution.passes import lone_sizes
from fdasync_transformers.execution.states.plan import plan_size
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.model.recurrent.states import versions_of
from fdasync_transformers.start.opened_runner import OpenedRunner, current
from fdasync_transformers.start.runner_config import graph_tokens

if TYPE_CHECKING:
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync_transformers.execution.gpu_services import GpuServices


class BoundRunner:
    """What a runner has besides once its blocks are allocated.

    Args:
        services: of the device.
        num_blocks, arena, host, snapshots: as `Runner.bind` takes them.

    Attributes:
        sleep: of its memory.
        executor: of its steps and copies.

    Raises ConfigError when the pool does not fit.
    """

    def __init__(
        self,
        opened: OpenedRunner,
        services: GpuServices,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None,
        snapshots: HostArena | None,
    ) -> None:
        step_model, capacity = opened.model.step_model, opened.capacity
        config, limits, shown, allocate = opened.config, opened.limits, opened.shown, opened.memory.allocator()
        try:
            for_blocks = allocate if shown is None else shown.allocate
            pool = KVPool(step_model.layout, num_blocks, capacity.block_tokens, opened.device, for_blocks)
        except (RuntimeError, MemoryError, OSError, RunnerError) as error:
            raise ConfigError("num_blocks", f"{num_blocks} KV blocks cannot be allocated: {error}") from error
        try:
            step_model.states = step_model.make_states(
                limits.max_running, capacity.num_snapshots, allocate, versions_of(limits.speculation)
            )
        except (RuntimeError, MemoryError, RunnerError) as error:
            live = limits.max_running * versions_of(limits.speculation)
            problem = f"{capacity.num_snapshots} snapshots beside {live} live states cannot be allocated: {error}"
            hint = "ask for fewer, for fewer running sequences, or for fewer drafts"
            raise ConfigError("num_snapshots", problem, hint=hint) from error
        if step_model.by_kernels and step_model.states is not None:
            rows = decode_rows(limits)
            sizes = config.graph_sizes or ladder(rows)
            if limits.speculation:
                sizes = lone_sizes(sizes, limits.max_running)
            # of a graph of steps without drafts each row is a sequence
            most = max(limits.max_running, sizes[-1])
            step_model.plan_size = plan_size(most, rows, limits.max_step_tokens, capacity.block_tokens)
        # first, so that closing the runner detaches what was attached before a failure
        step_model.aux = opened.aux
        step_model.aux.attach(limits.max_step_tokens)
        run = capacity.max_run_tokens
        table = InputBatch(limits.max_running, capacity.max_context_tokens, capacity.block_tokens, num_blocks, run)
        memory = Bound(
            pool=pool,
            table=table,
            arena=arena,
            host=host,
            snapshots=snapshots,
            aux=step_model.aux,
            matchers=LaneMatchers(opened.grammars, table),
            vocab_size=capacity.vocab_size,
            logits_dtype=config.logits_dtype,
            part=replace(pool.part, writes=not limits.rank) if opened.model.shares_blocks else pool.part,
            snapshot_part=HostPart(0, capacity.snapshot_nbytes, writes=not limits.rank) if snapshots else None,
            collectives=opened.collectives,
            speculation=run - 1,
            pipeline_depth=limits.pipeline_depth,
            lent=opened.lent,
            processors=opened.processors,
        )
        if shown is not None:
            shown.bind(memory, services)
        self.sleep = opened.memory.sleep(step_model.model, pool, step_model.states)
        self.executor = Executor(step_model, memory, services)


async def bind(
    opened: OpenedRunner, num_blocks: int, arena: AuxArena | None, host: HostArena | None, snapshots: HostArena | None
) -> BoundRunner:
    """As `Runner.bind`; closes the executor where it fails."""
    if (arena is not None) != (bool(opened.capacity.aux_specs) and not opened.limits.rank):
        raise InvariantBroken("an arena is bound exactly where there are aux data")
    # first, so that every failure below closes it: it has a timer
    services, bound = make_services(opened.device, by_kernels=opened.model.step_model.by_kernels), None
    try:
        with current(opened.device):
            bound = BoundRunner(opened, services, num_blocks, arena, host, snapshots)
            _warm(opened, bound.executor)
    except BaseException as error:  # closed whatever ends it, then raised
        if bound is not None:
            await bound.executor.aclose()
        else:
            await services.port.aclose()
        if isinstance(error, torch.OutOfMemoryError):
            problem = f"tables, capture and graphs beside {num_blocks} KV blocks cannot be allocated: {error}"
            raise ConfigError("num_blocks", problem, hint="ask for fewer, or for fewer or shorter sequences") from error
        raise
    return bound


def _warm(opened: OpenedRunner, executor: Executor) -> None:
    """Do at start-up what the first steps would else wait for."""
    config, limits, model = opened.config, opened.limits, opened.model
    executor.warm(limits.max_step_tokens)
    if not config.cuda_graphs or not executor.on_gpu:
        return
    try:
        executor.capture_graphs(config.graph_sizes or ladder(decode_rows(limits)))
        if tokens := graph_tokens(config, limits, model.step_model.model, model.experts):
            executor.capture_mixed(tokens, decode_rows(limits))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # models, kernels' compilers and drivers raise errors of many types
        problem = f"steps of this model cannot be captured: {error}"
        raise ConfigError("runner_config.cuda_graphs", problem, hint="set it to False") from error
