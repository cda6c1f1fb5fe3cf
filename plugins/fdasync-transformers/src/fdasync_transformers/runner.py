"""Serves Hugging Face mixture-of-experts checkpoints through transformers, with paged KV and exact routing.

The `Runner` of this plugin. Puts the parts together: loading, mends, probe, self-check, steps, sampling. An executor
performs steps and copies; on a CPU it computes where `launch` is called, so the runner belongs in a worker process.
Knows sequences by lane, blocks by id and slots by number; knows nothing of requests or text. Made by `make_runner` from
the entry point `transformers` of `fdasync.runners`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fdasync.cache.host_arena import HostPart
from fdasync.errors import (
    CheckpointError,
    ConfigError,
    FdasyncError,
    InvariantBroken,
    RunnerError,
    UnsupportedModel,
    WeightsBroken,
    WeightsRejected,
)
from fdasync.runner.base import Capacity, Runner, RunnerLimits
from fdasync.runner.chosen import ChosenRows, LentRows
from fdasync.runner.input_batch import InputBatch
from fdasync_transformers.capture.aux_data import AuxData, aux_specs, make_aux
from fdasync_transformers.capture.profiling import Profiling
from fdasync_transformers.execution.device_executor import DeviceExecutor
from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.execution.executor import Bound, Executor
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.graphs import decode_rows, ladder
from fdasync_transformers.execution.host_executor import HostExecutor
from fdasync_transformers.execution.lane_matchers import LaneMatchers
from fdasync_transformers.execution.memory_profile import choose_num_blocks, choose_num_snapshots, prefill_tokens_per_s
from fdasync_transformers.execution.model_memory import DeviceMemory, HostMemory
from fdasync_transformers.execution.shown_pool import ShownPool
from fdasync_transformers.execution.states.plan import plan_size
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model.families import decoder_layers
from fdasync_transformers.model.head import decoder_of
from fdasync_transformers.model.kv import KVLayout, KVPool
from fdasync_transformers.model.recurrent.states import versions_of
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.device_group import join
from fdasync_transformers.parallel.whole import agree
from fdasync_transformers.sampling.grammar_process import GrammarProcess
from fdasync_transformers.sampling.grammars import Grammars
from fdasync_transformers.sampling.paced import Paced
from fdasync_transformers.start.examine import examine
from fdasync_transformers.start.indexed import chosen_shape
from fdasync_transformers.start.open_model import Opened, open_model
from fdasync_transformers.start.runner_config import (
    TransformersConfig,
    check_config,
    check_device,
    check_numerics,
    device_of,
    graph_tokens,
    memory_share,
    uses_kernels,
)
from fdasync_transformers.start.stored import check_stored
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.groups.group import JoinedGroup
from fdasync_transformers.weights.groups.joined import JoinedGroups
from fdasync_transformers.weights.groups.reaching import reach
from fdasync_transformers.weights.groups.receiving import ReceivePlan, TensorReceiver
from fdasync_transformers.weights.update import LiveWeights, delta_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    from transformers import PreTrainedModel

    from fdasync.cache.aux import AuxSpec
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.ipc.exchange import Exchange
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.request import Grammar, GroupTensors, MemoryPart, WeightsFingerprint, WeightsGroup
    from fdasync.runner.base import CopyOutput, StepOutput, TensorMeta
    from fdasync.runner.report import ModelReport
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.execution.model_memory import ModelMemory
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers
    from fdasync_transformers.model.recurrent.states import StateLayout
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.weights.groups.receiving import Incoming


# of the loop's time, what compiling grammars may take; and seconds of it at once: some hundred ordinary ones
_COMPILING_SHARE, _COMPILING_BURST_S = 0.05, 0.3


class TransformersRunner(Runner):
    """One checkpoint and its paged KV cache; see `Runner` for the contract."""

    config_type: ClassVar[type[msgspec.Struct]] = TransformersConfig
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._step_model: StepModel | None = None
        self._moe: MoELayers | None = None
        self._routers: FusedRouters | None = None
        self._capacity: Capacity | None = None
        self._aux: AuxData | None = None
        self._executor: Executor | None = None
        self._shown: ShownPool | None = None
        self._memory: ModelMemory | None = None
        self._weights: LiveWeights | None = None
        self._grammars: Grammars | None = None
        self._checks: GrammarProcess | None = None
        self._compiling = Paced(_COMPILING_SHARE, _COMPILING_BURST_S)
        self._graph_tokens: tuple[int, ...] = ()
        self._profiling = Profiling()
        self._live = LiveRows()
        self._lent = LentRows()
        self._exchange: Exchange | None = None
        self._collectives: Collectives | None = None
        self._shares_blocks = False
        # of trainers, by name
        self._groups = JoinedGroups()
        # of the last update by one: its tensors, bucket and device, and where they go
        self._plan: tuple[tuple[Incoming, ...], tuple[int, torch.device], ReceivePlan] | None = None

    def examine(self) -> ModelReport:
        """As `Runner.examine`: builds the model on the meta device. Raises CheckpointError and ConfigError."""
        check_config(self.config, self.limits)
        device = device_of(self.config, self.limits)
        check_device(self.config, device)
        check_numerics(self.config, self.limits, device)
        check_stored(self.config, self.limits, device)
        return examine(self.config, self.limits, device)

    def join(self, exchange: Exchange) -> None:
        """As `Runner.join`: this process loads and computes its parts of the model."""
        if (exchange.rank, exchange.ranks) != (self.limits.rank, self.limits.tensor_parallel):
            problem = (
                f"rank {exchange.rank} of {exchange.ranks} for {self.limits.rank} of {self.limits.tensor_parallel}"
            )
            raise InvariantBroken(problem)
        self._exchange, self._collectives = exchange, HostCollectives(exchange)

    async def open(self) -> Capacity:
        """Load, mend, probe, check, size. Blocks its loop meanwhile.

        Raises CheckpointError, UnsupportedModel and ConfigError; checks the folder and the config before it takes much
        memory.
        """
        try:
            return self._open()
        except (FdasyncError, MemoryError):
            raise
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "model",
                f"its weights do not fit beside what is on the device: {error}",
                hint="see fdasync doctor --model",
            ) from error
        except Exception as error:
            # not the checkpoint's: reading it raises CheckpointError itself
            raise UnsupportedModel(self.limits.model, f"opening it fails: {type(error).__name__}: {error}") from error

    def _open(self) -> Capacity:
        config = self.config
        check_config(config, self.limits)
        device = device_of(config, self.limits)
        check_device(config, device)
        check_numerics(config, self.limits, device)
        check_stored(config, self.limits, device)
        if (self.limits.tensor_parallel > 1) != (self._collectives is not None):
            raise InvariantBroken(f"{self.limits.tensor_parallel} ranks, and this one did not join them before open")
        with _current(device):
            return self._load(device)

    def _load(self, device: torch.device) -> Capacity:
        config, limits = self.config, self.limits
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) - 1
            torch.set_num_threads(max(1, cores // limits.tensor_parallel))
        checkpoint = loading.read_checkpoint(limits.model, with_tensors=config.weights != "random")
        facts = identity.config_facts(checkpoint.config)
        joined = []
        if self._exchange is not None and device.type == "cuda":
            dtype = loading.choose_dtype(checkpoint, config.dtype)
            row = torch.empty(int(checkpoint.config.hidden_size), dtype=dtype, device="meta")
            self._collectives, note = join(
                self._exchange, device, config.collectives, row, may_share=config.ranks_share_gpu
            )
            joined.append(note)
        if device.type != "cuda":
            self._memory = HostMemory()
        elif config.sleep and not limits.shows_blocks:
            self._memory = DeviceMemory(device)
        opened = open_model(
            checkpoint, config, limits, device, self._make_step_model, self._live, self._collectives, self._memory
        )
        self._shares_blocks = opened.shares_blocks
        self._step_model, self._routers = opened.step_model, opened.routers
        self._moe = opened.experts if limits.capture is not False else None
        model = opened.step_model.model
        specs = aux_specs(model, self._moe, config.aux)
        self._graph_tokens = graph_tokens(config, limits, model, opened.experts)
        num_blocks = limits.num_blocks or choose_num_blocks(
            opened.step_model,
            limits,
            opened.max_context_tokens,
            opened.block_tokens,
            config.kv_cache_nbytes,
            share=memory_share(config, limits, device),
            graphs=len(self._graph_tokens) if config.cuda_graphs else 0,
            held=0 if self._memory is None else self._memory.held_nbytes,
        )
        self._weights = LiveWeights(opened.names, facts, self._collectives)
        notes = [*joined, *opened.notes]
        self._grammars = _grammars_of(checkpoint, model, notes)
        # rank 0 samples
        if self._grammars is not None and not limits.rank:
            path = checkpoint.folder / "tokenizer.json"
            self._checks = GrammarProcess(path, int(model.config.vocab_size), loading.eos_ids(checkpoint))
        num_snapshots = choose_num_snapshots(opened.step_model, limits, num_blocks, opened.block_tokens)
        self._capacity = self._describe(checkpoint, opened, num_blocks, num_snapshots, specs, tuple(notes))
        return self._capacity

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        """Allocate the pool, attach what records, capture graphs. Blocks its loop meanwhile.

        Raises ConfigError when the pool does not fit, or no graph can hold what the model does.
        """
        step_model, capacity = self._step_model, self._capacity
        if step_model is None or capacity is None:
            raise InvariantBroken("bind before open")
        if (arena is not None) != (bool(capacity.aux_specs) and not self.limits.rank):
            raise InvariantBroken("an arena is bound exactly where there are aux data")
        device = step_model.model.device
        services = None
        if isinstance(step_model, DeviceStepModel):
            # first, so that every failure below closes it: it has a timer
            services = make_services(device)
        try:
            with _current(device):
                self._executor = executor = self._bind(
                    step_model, capacity, services, num_blocks, arena, host, snapshots
                )
                if isinstance(executor, DeviceExecutor):
                    self._warm(executor)
        except BaseException as error:
            bound, self._executor = self._executor, None
            if bound is not None:
                await bound.aclose()
            elif services is not None:
                await services.port.aclose()
            if isinstance(error, torch.OutOfMemoryError):
                problem = f"tables, capture and graphs beside {num_blocks} KV blocks cannot be allocated: {error}"
                raise ConfigError(
                    "num_blocks", problem, hint="ask for fewer, or for fewer or shorter sequences"
                ) from error
            raise

    def _warm(self, executor: DeviceExecutor) -> None:
        """Do at start-up what the first steps would else wait for."""
        executor.warm(self.limits.max_step_tokens)
        if not self.config.cuda_graphs or not executor.on_gpu:
            return
        try:
            executor.capture_graphs(self.config.graph_sizes or ladder(decode_rows(self.limits)))
            if self._graph_tokens:
                executor.capture_mixed(self._graph_tokens, decode_rows(self.limits))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models, kernels' compilers and drivers raise errors of many types
            problem = f"steps of this model cannot be captured: {error}"
            raise ConfigError("runner_config.cuda_graphs", problem, hint="set it to False") from error

    def _bind(
        self,
        step_model: StepModel,
        capacity: Capacity,
        services: GpuServices | None,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None,
        snapshots: HostArena | None,
    ) -> Executor:
        device, limits = step_model.model.device, self.limits
        shown = self._shown = ShownPool(device) if limits.shows_blocks else None
        allocate = None if self._memory is None else self._memory.allocator()
        if shown is not None:
            allocate = shown.allocate
        try:
            pool = KVPool(step_model.layout, num_blocks, capacity.block_tokens, device, allocate)
        except (RuntimeError, MemoryError, OSError, RunnerError) as error:
            raise ConfigError("num_blocks", f"{num_blocks} KV blocks cannot be allocated: {error}") from error
        try:
            step_model.states = step_model.make_states(
                limits.max_running,
                capacity.num_snapshots,
                None if self._memory is None else self._memory.allocator(),
                versions_of(limits.speculation),
            )
        except (RuntimeError, MemoryError, RunnerError) as error:
            live = limits.max_running * versions_of(limits.speculation)
            problem = f"{capacity.num_snapshots} snapshots beside {live} live states cannot be allocated: {error}"
            hint = "ask for fewer, for fewer running sequences, or for fewer drafts"
            raise ConfigError("num_snapshots", problem, hint=hint) from error
        if isinstance(step_model, DeviceStepModel) and step_model.states is not None:
            rows = decode_rows(limits)
            sizes = self.config.graph_sizes or ladder(rows)
            if limits.speculation:
                sizes = DeviceExecutor.lone_sizes(sizes, limits.max_running)
            # of a graph of steps without drafts each row is a sequence
            most = max(limits.max_running, sizes[-1])
            step_model.plan_size = plan_size(most, rows, limits.max_step_tokens, capacity.block_tokens)
        if self._memory is not None:
            self._memory.bind(pool, step_model.states)
        self._aux = step_model.aux = make_aux(
            step_model.model,
            self._moe,
            self.config.aux,
            limits.max_step_tokens,
            debug=limits.routing_debug,
            routers=self._routers,
        )
        run = capacity.max_run_tokens
        table = InputBatch(limits.max_running, capacity.max_context_tokens, capacity.block_tokens, num_blocks, run)
        bound = Bound(
            pool=pool,
            table=table,
            arena=arena,
            host=host,
            snapshots=snapshots,
            aux=self._aux,
            matchers=LaneMatchers(self._grammars, table),
            vocab_size=capacity.vocab_size,
            logits_dtype=self.config.logits_dtype,
            part=replace(pool.part, writes=not limits.rank) if self._shares_blocks else pool.part,
            snapshot_part=HostPart(0, capacity.snapshot_nbytes, writes=not limits.rank) if snapshots else None,
            collectives=self._collectives,
            speculation=run - 1,
            pipeline_depth=limits.pipeline_depth,
            lent=self._lent,
        )
        if shown is not None:
            shown.bind(bound, services)
        if services is None or not isinstance(step_model, DeviceStepModel):
            return HostExecutor(step_model, bound)
        return DeviceExecutor(step_model, bound, services)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """On a CPU the future is done on return, on a GPU when the device is done. A failure fails the runner too."""
        if self._half_loaded:
            return _failed(RunnerError(self._half_loaded, step.step_id))
        if self._memory is not None and self._memory.released:
            return _failed(RunnerError("its memory is released", step.step_id))
        if self._executor is None:
            return _failed(RunnerError("the runner is closed, or not bound yet", step.step_id))
        return self._executor.launch(step)

    async def lend(self, key: int, rows: ChosenRows) -> None:
        self._lent.lend(key, rows)

    def take_back(self, key: int) -> None:
        self._lent.take_back(key)

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """As `launch`."""
        if self._executor is None:
            return _failed(RunnerError("the runner is closed, or not bound yet"))
        return self._executor.copy(copy)

    def peer_blocks(self) -> PeerBlocks | None:
        return None if self._shown is None else self._shown.rows

    async def check_grammar(self, grammar: Grammar) -> None:
        """Has a child process check it first: compiling it may take minutes."""
        if self._grammars is None:
            await super().check_grammar(grammar)
        # of a group rank 0 alone samples, and checks
        elif self._checks is not None:
            await self._checks.check(grammar)
            # so that no step compiles it
            await self._compiling.run(partial(self._grammars.check, grammar))

    async def profile(self, parent: str, name: str, seconds: float) -> str:
        folder = Path(parent or tempfile.gettempdir(), name)
        return await self._profiling.record(folder, self.limits.rank, seconds, device_of(self.config, self.limits))

    # -- new weights; all of it blocks the loop of the worker process -------------------------------

    async def load_folder(self, path: str) -> str:
        if self.config.weights == "random" and path == self.limits.model:
            # that folder has a config alone
            self._opened_weights.redraw()
            weights_id = identity.DRAWN_ID
        else:
            weights_id = self._opened_weights.load_folder(path)
        self._settle()
        return weights_id

    async def read_weights_id(self, path: str) -> str:
        return self._opened_weights.read_id(path)

    async def delta_base(self, path: str) -> str:
        return delta_base(path)

    async def forget_weights(self) -> None:
        self._opened_weights.drop()

    async def fingerprint_weights(self, with_tensors: bool = False) -> WeightsFingerprint:
        return self._opened_weights.fingerprint(with_tensors)

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        self._opened_weights.begin(tensors)

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        self._opened_weights.write(number, offset_nbytes, data)

    async def end_tensors(self) -> None:
        self._opened_weights.end()
        self._settle()

    async def reach_group(self, group: WeightsGroup) -> None:
        if not self._groups.holds(group):
            await reach(group)

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, stop: int = -1) -> None:
        if self._groups.holds(group):
            return
        await self.leave_group(group.name)
        device = torch.device("cpu") if self._step_model is None else self._step_model.model.device
        if group.backend == "nccl" and device.type != "cuda":
            raise WeightsRejected(f"group {group.name!r}: this model is on a CPU, and NCCL is between GPUs; use gloo")
        with _current(device):
            self._groups.add(JoinedGroup(group, interface, limit_s=limit_s, stop=stop))

    async def leave_group(self, name: str) -> None:
        self._groups.leave(name)

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        until = asyncio.get_running_loop().time() + limit_s
        weights, group = self._opened_weights, self._groups.get(source.group)
        try:
            incoming = weights.begin(source.tensors, first=first, last=last)
            weights.touch()
            problem = ""
            try:
                plan = self._plan_of(source, incoming, group)
                await TensorReceiver(group, plan, checksum=source.checksum).run(until)
            except WeightsBroken as error:
                problem = error.problem
            except (RuntimeError, MemoryError) as error:
                # no room for a buffer, or a device that failed: other ranks must hear of it
                problem = f"{type(error).__name__}: {error}"
            self._settle()
            weights.received(problem, last=last)
        except (WeightsRejected, WeightsBroken) as error:
            raise type(error)(self._groups.failed(source.group, error.problem)) from error
        except BaseException:
            await self.leave_group(source.group)
            raise

    def _plan_of(self, source: GroupTensors, incoming: tuple[Incoming, ...], group: JoinedGroup) -> ReceivePlan:
        """The last update's plan, if its tensors were the same (parameters stay where they are); else a new one."""
        asked = (source.bucket_nbytes, group.device)
        if self._plan is None or self._plan[0] is not incoming or self._plan[1] != asked:
            self._plan = incoming, asked, ReceivePlan(incoming, source.bucket_nbytes, group.device)
        return self._plan[2]

    async def end_received(self) -> None:
        self._opened_weights.end_parts()

    # -- sleep; all of it blocks the loop of the worker process --------------------------------------

    async def release_memory(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """As `Runner.release_memory`. Graphs stay: what they hold are addresses, which stay too."""
        memory = self._sleeping
        if "weights" in parts and not keep_weights:
            self._opened_weights.drop()
        # a collected cycle may hold tensors
        gc.collect()
        with _current(self.model.device):
            memory.release(parts, keep_weights=keep_weights)

    async def regain_memory(self, part: MemoryPart) -> None:
        with _current(self.model.device):
            self._sleeping.regain(part)

    @property
    def _sleeping(self) -> ModelMemory:
        if self._memory is None:
            raise InvariantBroken("a sleep of a runner that offers none")
        return self._memory

    def _settle(self) -> None:
        """Wait for the new weights: they were written on another stream than the next step's."""
        if self._step_model is not None and self._step_model.model.device.type == "cuda":
            torch.cuda.synchronize(self._step_model.model.device)  # blocking: no step is in flight, in a worker process

    @property
    def model(self) -> PreTrainedModel:
        """The model that is served, for tools that watch its modules. Raises InvariantBroken before `open`."""
        if self._step_model is None:
            raise InvariantBroken("the model before it was opened, or after the end")
        return self._step_model.model

    @property
    def _opened_weights(self) -> LiveWeights:
        if self._weights is None:
            raise InvariantBroken("new weights before the first ones")
        return self._weights

    @property
    def _half_loaded(self) -> str:
        """Why no step may be computed with these weights, or ""."""
        broken = self._weights is not None and self._weights.broken
        return "no steps with weights of which only a part was replaced" if broken else ""

    async def aclose(self) -> None:
        """Free model, KV, graphs and hooks; idempotent. Waits for the device's work, bounded."""
        executor, self._executor = self._executor, None
        dead = False
        self._groups.close()
        try:
            if self._checks is not None:
                await self._checks.aclose()
            try:
                if self._shown is not None:
                    await self._shown.aclose()
            finally:
                if executor is not None:
                    await executor.aclose()
        finally:
            dead = isinstance(executor, DeviceExecutor) and executor.device_failed
            if self._aux is not None:
                self._aux.close()
            on_gpu = self._step_model is not None and self._step_model.model.device.type == "cuda"
            self._aux = self._routers = self._step_model = self._weights = self._plan = executor = None
            shown, self._shown = self._shown, None
            if shown is not None and not dead:
                shown.free()
            memory, self._memory = self._memory, None
            if memory is not None:
                memory.forget()
            if on_gpu and not dead:
                # models are reference cycles: collect them, then give their memory back to the device
                gc.collect()
                torch.cuda.empty_cache()
            if memory is not None and not dead:
                memory.close()

    def _make_step_model(self, model: PreTrainedModel, layout: KVLayout, state: StateLayout | None) -> StepModel:
        """It has kernels on GPUs, torch's attention on CPUs, unless configured otherwise. Raises ConfigError."""
        fixed = self.limits.numerics == "fixed"
        if not uses_kernels(self.config, model.device):
            if model.device.type == "cuda":
                raise ConfigError("runner_config.kernels", '"torch" is for CPUs: it waits for a GPU at every step')
            return StepModel(model, layout, fixed=fixed, state=state)
        if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("runner_config.kernels", '"triton" on a CPU needs the environment TRITON_INTERPRET=1')
        limits = self.limits
        return DeviceStepModel(
            model, layout, decode_rows(limits), live=self._live, fixed=fixed, most_run=1 + limits.speculation,
            state=state, agree=partial(agree, self._collectives, label="a proof"),
        )  # fmt: skip

    def _no_sleep(self) -> str:
        if self.limits.shows_blocks:
            return "other instances of this machine have its blocks mapped: use another transport than device"
        return (
            "" if self._memory is not None else "set runner_config.sleep: its memory must lie where it can be released"
        )

    def _describe(
        self,
        checkpoint: loading.Checkpoint,
        opened: Opened,
        num_blocks: int,
        num_snapshots: int,
        specs: tuple[AuxSpec, ...],
        notes: tuple[str, ...],
    ) -> Capacity:
        model, layout, moe = opened.step_model.model, opened.step_model.layout, self._moe
        max_context, block_tokens = opened.max_context_tokens, opened.block_tokens
        recurrent = opened.step_model.recurrent
        uneven = moe is not None and len(set(moe.top_k)) > 1
        return Capacity(
            model=f"{checkpoint.folder.name} ({checkpoint.model_type})",
            fingerprint=identity.fingerprint(model, self.limits.numerics),
            weights_id=identity.DRAWN_ID
            if self.config.weights == "random"
            else identity.whole_weights_id(opened.names, self._collectives),
            vocab_size=int(model.config.vocab_size),
            eos_ids=loading.eos_ids(checkpoint),
            max_context_tokens=max_context,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            block_nbytes=block_tokens * layout.token_nbytes,
            kv_layout=layout.name,
            kv_dtype=str(layout.dtype).removeprefix("torch."),
            dtype=str(model.dtype).removeprefix("torch."),
            aux_specs=specs,
            state_specs=() if recurrent is None else recurrent.layout.specs,
            num_snapshots=num_snapshots,
            moe_layer_ids=() if moe is None else moe.ids,
            num_hidden_layers=len(decoder_layers(model)),
            num_experts=0 if moe is None else moe.num_experts,
            top_k=0 if moe is None else max(moe.top_k),
            top_k_by_layer=moe.top_k if moe is not None and uneven else None,
            tokenizer="transformers" if (checkpoint.folder / "tokenizer.json").exists() else "",
            grammars=self._grammars is not None,
            scores_prompts=decoder_of(model) is not None,
            chosen=chosen_shape(model),
            routing_debug=self.limits.routing_debug and moe is not None,
            prefill_tokens_per_s=prefill_tokens_per_s(opened.step_model, self.limits, max_context, block_tokens),
            numerics=self.limits.numerics,
            sum_slices=self.limits.sum_slices,
            tensor_parallel=self.limits.tensor_parallel,
            max_run_tokens=1 + self.limits.speculation,
            drafter="mtp" if self.config.mtp and self.limits.speculation else "",
            no_sleep=self._no_sleep(),
            notes=notes,
        )


def _grammars_of(checkpoint: loading.Checkpoint, model: PreTrainedModel, notes: list[str]) -> Grammars | None:
    """None, and a note, where the checkpoint has no tokenizer to read grammars by."""
    tokenizer, eos_ids = checkpoint.folder / "tokenizer.json", loading.eos_ids(checkpoint)
    if not tokenizer.exists() or not eos_ids:
        notes.append("no grammars: there is no tokenizer.json, or no EOS")
        return None
    try:
        return Grammars(tokenizer, int(model.config.vocab_size), eos_ids)
    except CheckpointError as error:
        notes.append(f"no grammars: {error.problem}")
        return None


def _failed(error: RunnerError) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _current(device: torch.device) -> AbstractContextManager[object]:
    """While it is entered, this GPU is the current device; does nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
