"""Serves Hugging Face mixture-of-experts checkpoints through transformers, with paged KV and exact routing.

The `Runner` of this plugin. Puts the parts together: loading, mends, probe, self-check, steps, sampling.
Computes where `launch` is called, so it belongs in a worker process. Knows sequences by lane, blocks by id
and slots by number; knows nothing of requests or text. Created by the registry from the entry point
`transformers` of `fdasync.runners`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import numpy as np
import torch

from fdasync.actions import RunStep, SwapIn, SwapOut
from fdasync.errors import CheckpointError, ConfigError, FdasyncError, InvariantBroken, RunnerError, UnsupportedModel
from fdasync.runner.base import Capacity, CopyOutput, Runner, RunnerLimits, StepOutput
from fdasync.runner.lanes import LaneTable
from fdasync_transformers import families, loading, probe, selfcheck
from fdasync_transformers.capture import MoELayers, RoutingCapture, find_moe_layers
from fdasync_transformers.kv import KVLayout, KVPool
from fdasync_transformers.profile import choose_num_blocks, prefill_tokens_per_s
from fdasync_transformers.sampler import sample
from fdasync_transformers.step import StepModel
from fdasync_transformers.swap import BlockCopier
from fdasync_transformers.weights import LiveWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from fdasync.cache.arena import AuxArena
    from fdasync.cache.host import HostArena
    from fdasync.runner.base import TensorMeta
    from fdasync.runner.lanes import Batch


_MAX_THREADS = 1024


class TransformersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the `transformers` runner.

    Attributes:
        dtype: of weights and KV; "auto" is the checkpoint's own.
        device: "auto" is the first GPU, else the CPU; or any torch device name.
        logits_dtype: the dtype that sampling and log-probs work in.
        num_threads: of torch in the runner's process. None: on a CPU device one core fewer than there are (the
            engine's loop needs one, and torch's threads wait for the slowest of them); else as it is.
        experts: the library's implementation of the experts; "auto" is its default.
        kv_cache_nbytes: memory for KV when `num_blocks` is None; None takes a share of what is free.
        latent_mla: page the latents of MLA layers instead of the expanded keys and values.
        self_check: compare a mixed paged batch with the plain model at start-up, and refuse if they differ.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    logits_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_threads: int | None = None
    experts: Literal["auto", "eager", "grouped_mm", "batched_mm"] = "auto"
    kv_cache_nbytes: int | None = None
    latent_mla: bool = True
    self_check: bool = True


class TransformersRunner(Runner):
    """One checkpoint and its paged KV cache; see `Runner` for the contract."""

    config_type: ClassVar[type[msgspec.Struct]] = TransformersConfig
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._step_model: StepModel | None = None
        self._moe: MoELayers | None = None
        self._capacity: Capacity | None = None
        self._pool: KVPool | None = None
        self._table: LaneTable | None = None
        self._arena: AuxArena | None = None
        self._capture: RoutingCapture | None = None
        self._copier: BlockCopier | None = None
        self._weights: LiveWeights | None = None
        self._failure = ""

    async def open(self) -> Capacity:
        """Load, mend, look, check, size. Blocks its loop while it does.

        Raises CheckpointError, UnsupportedModel and ConfigError; nothing large is in memory before the folder
        and the config were found good.
        """
        try:
            return self._open()
        except (FdasyncError, MemoryError):
            raise
        except Exception as error:
            # the library trips over values that no checkpoint should have, in ways of its own
            problem = f"the model cannot be built or run: {type(error).__name__}: {error}"
            raise CheckpointError(self.limits.model, problem) from error

    def _open(self) -> Capacity:
        config, limits = self.config, self.limits
        _check_config(config)
        device = _device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif device.type == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        checkpoint = loading.read_checkpoint(limits.model)
        families.refuse_unservable(checkpoint.config)
        if limits.capture is True and not families.expected_moe_layers(checkpoint.config):
            raise ConfigError(
                "routing", f"{checkpoint.model_type} has no MoE layers", hint='set capture to "auto" or False'
            )
        facts = loading.config_facts(checkpoint.config)
        model = loading.load(checkpoint, config.dtype, device)
        families.refuse_stateful(model)
        _set_experts(model, config.experts)
        self._moe = find_moe_layers(model) if limits.capture is not False else None
        max_context = _max_context(model, limits)
        reference = selfcheck.plain_passes(model, self._moe, max_context) if config.self_check else None
        mends = families.mend(model)
        max_context = min(max_context, mends.max_context_tokens or max_context)
        layers = probe.attention_layers(model, latent=config.latent_mla, query_scales=mends.query_scales)
        self._step_model = StepModel(model, KVLayout(layers, model.dtype))
        block_tokens = limits.block_tokens or self._step_model.layout.choose_block_tokens()
        notes = [*mends.notes, f"experts: {model.config._experts_implementation or 'own'}"]
        if reference is not None:
            notes.append(selfcheck.check(self._step_model, self._moe, reference, block_tokens))
        num_blocks = limits.num_blocks or choose_num_blocks(
            self._step_model, limits, max_context, block_tokens, config.kv_cache_nbytes
        )
        self._weights = LiveWeights(model, facts)
        self._capacity = self._describe(checkpoint, max_context, block_tokens, num_blocks, tuple(notes))
        return self._capacity

    async def bind(self, num_blocks: int, arena: AuxArena | None, host: HostArena | None = None) -> None:
        """Allocate the pool and hook the experts. Raises ConfigError when the pool does not fit."""
        step_model, capacity = self._step_model, self._capacity
        if step_model is None or capacity is None:
            raise InvariantBroken("bind before open")
        if (arena is not None) != (self._moe is not None):
            raise InvariantBroken("an arena is bound exactly when routing is captured")
        try:
            self._pool = KVPool(step_model.layout, num_blocks, capacity.block_tokens, step_model.model.device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError("num_blocks", f"{num_blocks} KV blocks cannot be allocated: {error}") from error
        self._table = LaneTable(self.limits.max_running, capacity.max_context_tokens, capacity.block_tokens, num_blocks)
        self._arena = arena
        self._copier = None if host is None else BlockCopier(self._pool, host)
        if self._moe is not None:
            self._capture = RoutingCapture(step_model.model, self._moe, self.limits.max_step_tokens)
        step_model.capture = self._capture

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """Perform a step; the future is done on return. Never raises: a failure ends the future, and the runner."""
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        if self._failure or self._half_loaded:
            problem = f"no steps after a failure: {self._failure}" if self._failure else self._half_loaded
            future.set_exception(RunnerError(problem, step.step_id))
            return future
        try:
            output = self._perform(step)  # blocking: a CPU forward pass; the runner lives in a worker process
        except Exception as error:  # a model may raise anything, and a step must still end
            self._failure = f"{type(error).__name__}: {error}"
            failed = RunnerError(self._failure, step.step_id)
            failed.__cause__ = error
            future.set_exception(failed)
        else:
            future.set_result(output)
        return future

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Move blocks; the future is done on return. Never raises: a failure ends the future, and the runner."""
        future: asyncio.Future[CopyOutput] = asyncio.get_running_loop().create_future()
        if self._failure:
            future.set_exception(RunnerError(f"no copies after a failure: {self._failure}"))
            return future
        try:
            output = self._move(copy)  # blocking: memory to memory; the runner lives in a worker process
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            failed = RunnerError(self._failure)
            failed.__cause__ = error
            future.set_exception(failed)
        else:
            future.set_result(output)
        return future

    # -- new weights; all of it blocks the loop of the worker process -------------------------------

    async def load_folder(self, path: str) -> str:
        return self._opened_weights.load_folder(path)

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        self._opened_weights.begin(tensors)

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        self._opened_weights.write(number, offset_nbytes, data)

    async def end_tensors(self) -> None:
        self._opened_weights.end()

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
        """Free model, KV and hooks; idempotent. No step is ever under way between calls."""
        self._failure = self._failure or "the runner is closed"
        if self._capture is not None:
            self._capture.close()
        on_gpu = self._step_model is not None and self._step_model.model.device.type == "cuda"
        self._capture = self._step_model = self._pool = self._table = self._arena = None
        self._copier = self._weights = None
        if on_gpu:
            torch.cuda.empty_cache()

    def _perform(self, step: RunStep) -> StepOutput:
        step_model, table, pool = self._step_model, self._table, self._pool
        if step_model is None or table is None or pool is None:
            raise InvariantBroken("a step before bind")
        batch = table.plan(step)
        for start in step.starts:
            column, offset = divmod(start.num_cached, pool.block_tokens)
            if offset:
                # begun by another instance, within a block that was copied whole
                pool.clear_past(start.blocks[column], offset)
        if not len(batch.positions):
            return StepOutput(step.step_id, ())
        rows = (np.cumsum(batch.counts) - 1)[batch.sampled]
        logits = step_model.run(batch, table, pool, rows)
        if self._capture is not None and self._arena is not None:
            values = {"routing": self._capture.rows(len(batch.positions))}
            self._arena.scatter(batch.aux_index, batch.generations, values)
        if not len(rows):
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)  # the KV must be there when the step is done
            return StepOutput(step.step_id, ())
        return self._sample(batch, table, logits)

    def _move(self, copy: SwapOut | SwapIn) -> CopyOutput:
        copier, table = self._copier, self._table
        if copier is None or table is None:
            raise InvariantBroken("a copy, and there is no host tier")
        rows_before = self._arena.written_nbytes if self._arena is not None else 0
        if isinstance(copy, SwapOut):
            moved = copier.out(copy.device, copy.host)
        else:
            moved = copier.back(copy.host, copy.device)
            table.place(copy.device, copy.slots, copy.generations)
        rows = self._arena.written_nbytes - rows_before if self._arena is not None else 0
        return CopyOutput(copy.copy_id, moved, rows)

    def _sample(self, batch: Batch, table: LaneTable, logits: torch.Tensor) -> StepOutput:
        """Sample, and keep the tokens where the next step reads them."""
        lanes = batch.lanes[batch.sampled]
        positions = table.length[lanes]
        chosen = lanes.tolist()
        specs = [spec for lane in chosen if (spec := table.samplers[lane]) is not None]
        ends = positions.tolist()
        histories = [table.tokens[lane, :end] for lane, end in zip(chosen, ends, strict=True)]
        logits = logits[:, : self._vocab_size].to(getattr(torch, self.config.logits_dtype))
        out = sample(logits, specs, ends, histories)
        # a sequence at the end of its context samples a token that no step will read
        kept = positions < table.tokens.shape[1]
        table.tokens[lanes[kept], positions[kept]] = np.array(out.tokens, np.int32)[kept]
        return StepOutput(
            batch.step_id,
            tuple(out.tokens),
            None if out.raw is None else tuple(out.raw),
            None if out.processed is None else tuple(out.processed),
            None if out.top is None else tuple(out.top),
        )

    @property
    def _vocab_size(self) -> int:
        return 0 if self._capacity is None else self._capacity.vocab_size

    def _describe(
        self,
        checkpoint: loading.Checkpoint,
        max_context: int,
        block_tokens: int,
        num_blocks: int,
        notes: tuple[str, ...],
    ) -> Capacity:
        assert self._step_model is not None
        model, layout, moe = self._step_model.model, self._step_model.layout, self._moe
        uneven = moe is not None and len(set(moe.top_k)) > 1
        return Capacity(
            model=f"{checkpoint.folder.name} ({checkpoint.model_type})",
            fingerprint=loading.fingerprint(model),
            weights_id=loading.weights_id(model),
            vocab_size=int(model.config.vocab_size),
            eos_ids=loading.eos_ids(checkpoint),
            max_context_tokens=max_context,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            block_nbytes=block_tokens * layout.token_nbytes,
            kv_layout=layout.name,
            kv_dtype=str(layout.dtype).removeprefix("torch."),
            aux_specs=() if moe is None else (moe.spec,),
            moe_layer_ids=() if moe is None else moe.ids,
            num_experts=0 if moe is None else moe.num_experts,
            top_k=0 if moe is None else max(moe.top_k),
            top_k_by_layer=moe.top_k if moe is not None and uneven else None,
            tokenizer="transformers" if (checkpoint.folder / "tokenizer.json").exists() else "",
            prefill_tokens_per_s=prefill_tokens_per_s(self._step_model, self.limits, max_context, block_tokens),
            notes=notes,
        )


def _check_config(config: TransformersConfig) -> None:
    if config.num_threads is not None and not 1 <= config.num_threads <= _MAX_THREADS:
        raise ConfigError(
            "runner_config.num_threads", f"{config.num_threads} is out of range", limit=f"1 to {_MAX_THREADS}"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("runner_config.device", f"{name!r} cannot be used: {error}") from error
    if device.type == "meta":
        raise ConfigError("runner_config.device", "'meta' holds no data")
    return device


def _set_experts(model: PreTrainedModel, experts: str) -> None:
    if experts == "auto":
        return
    try:
        model.set_experts_implementation(experts)
    except ValueError as error:
        raise ConfigError("runner_config.experts", str(error), hint='use "auto"') from error


def _max_context(model: PreTrainedModel, limits: RunnerLimits) -> int:
    own = getattr(model.config, "max_position_embeddings", None)
    if own is None:
        raise UnsupportedModel(str(model.config.model_type), "its config has no max_position_embeddings")
    return min(int(own), limits.max_context_tokens or int(own))
