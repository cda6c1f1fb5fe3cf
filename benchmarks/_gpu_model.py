"""The model of `gpu_serving`, loaded once, with two arms over one pool of KV.

An arm is a whole device path of its own (lane table, executor, CUDA graphs), with the routing captured or not. Both
arms have the same fused routers but for the write of the ids, the same weights, the same KV blocks and the same block
tables. Where a step is no graph (prefill, everything on a CPU), the model is switched to the arm first. Drives the
plugin's parts by hand, as `TransformersRunner.bind` does. Knows no figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.capture.routing import RoutingCapture
from fdasync_transformers.execution.device_executor import DeviceExecutor
from fdasync_transformers.execution.executor import Bound
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.lane_matchers import LaneMatchers
from fdasync_transformers.fused.routers import fuse_routers
from fdasync_transformers.model.kv import KVPool

from fdasync.cache.aux_arena import AuxArena
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.base import RunnerLimits
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import torch

    from benchmarks._gpu_scale import Scale
    from fdasync.runner.base import StepOutput

GREEDY = SamplerSpec(0, 0, 0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, (), False, False, 0)


class Arm:
    """One device path over the shared model and pool.

    Attributes:
        name: for people.
        running: sequences that decode; keys below it.
        position: of the next token of every sequence.
    """

    def __init__(self, rig: Rig, name: str, capture: RoutingCapture | None, arena: AuxArena | None) -> None:
        scale = rig.scale
        self.name = name
        self.capture = capture
        self.aux = None if capture is None else AuxData((capture,))
        self.running = 0
        self.position = scale.context
        self._rig = rig
        self._step_id = 0
        self._forwards = [module.__dict__["forward"] for module in rig.routers]
        self.table = InputBatch(
            scale.sizes[-1], scale.blocks_each * scale.block_tokens, scale.block_tokens, len(rig.pool.blocks)
        )
        bound = Bound(
            pool=rig.pool,
            table=self.table,
            arena=arena,
            host=None,
            aux=self.aux,
            matchers=LaneMatchers(None, self.table),
            vocab_size=scale.config["vocab_size"],
            logits_dtype="float32",
        )
        self.select()
        self.executor = DeviceExecutor(rig.step_model, bound, rig.services)
        if rig.device.type == "cuda":
            self.executor.capture_graphs(scale.sizes)

    def select(self) -> None:
        """Steps that are no graphs are this arm's from now on."""
        self._rig.step_model.aux = self.aux
        for module, forward in zip(self._rig.routers, self._forwards, strict=True):
            module.forward = forward

    def _launch(self, **parts: Any) -> asyncio.Future[StepOutput]:
        self._step_id += 1
        return self.executor.launch(RunStep(self._step_id, **parts))

    def prefill(self, keys: Sequence[int], cached: int) -> asyncio.Future[StepOutput]:
        """Start these sequences, whose first `cached` tokens have KV, and forward the rest of their prompts."""
        size, context = self._rig.scale.block_tokens, self._rig.scale.context
        starts = []
        for key in keys:
            blocks = self._rig.blocks[key][: context // size]
            slots = tuple(blocks[cached // size :]) if self.capture is not None else ()
            tokens = np.array(self._rig.prompts[key], "<i4").tobytes()
            starts.append(SeqStart(key, tokens, cached, tuple(blocks), slots, (1,) * len(slots), GREEDY))
        chunks = tuple(Chunk(key, context - cached, True) for key in keys)
        # those that have started stand by
        future = self._launch(starts=tuple(starts), skips=tuple(range(self.running)), chunks=chunks)
        self.running += len(keys)
        return future

    def decode(self, leaves: tuple[int, ...] = ()) -> asyncio.Future[StepOutput]:
        """Launch a decode step of all that run."""
        size = self._rig.scale.block_tokens
        appends: tuple[BlockAppend, ...] = ()
        if self.position % size == 0:
            number = self.position // size
            new = [self._rig.blocks[key][number] for key in range(self.running)]
            slots = new if self.capture is not None else [-1] * len(new)
            appends = tuple(
                BlockAppend(key, block, slot, 1) for key, (block, slot) in enumerate(zip(new, slots, strict=True))
            )
        self.position += 1
        return self._launch(leaves=leaves, appends=appends)

    async def shrink(self, count: int) -> None:
        """Let all sequences but the first `count` leave; forwards one token of the others."""
        if count < self.running:
            leaves = tuple(range(count, self.running))
            self.running = count
            self.rewind()
            await self.decode(leaves)

    async def grow(self, count: int) -> None:
        """Let sequences that left come again, up to `count`; KV of all but the last block of each is still there."""
        if count > self.running:
            self.select()
            await self.prefill(range(self.running, count), self._rig.scale.context - self._rig.scale.block_tokens)

    def rewind(self) -> None:
        """Forget what was decoded: every sequence is at the end of its prompt again. Nothing may be in flight.

        The device's tables keep what they hold: the token after the prompt is there, later ones are sampled anew.
        """
        lanes = [self.table.lane_of(key) for key in range(self.running)]
        self.table.length[lanes] = self._rig.scale.context
        self.table.num_blocks[lanes] = self._rig.scale.context // self._rig.scale.block_tokens
        self.position = self._rig.scale.context


class Rig:
    """One loaded model, one pool, and arms "on" and "off"; `open` makes it."""

    scale: Scale
    device: torch.device
    arms: dict[str, Arm]

    @classmethod
    async def open(cls, scale: Scale, folder: str, names: Sequence[str], say: Callable[[str], None]) -> Rig:
        """Draw the weights, allocate the pool, fuse the routers, capture graphs; no sequence has started.

        Raises RuntimeError where a router is not fused: the arms would differ in more than the capture.
        """
        rig = cls()
        rig.scale = scale
        num_blocks = scale.sizes[-1] * scale.blocks_each
        rig.runner = TransformersRunner(
            TransformersConfig(**{**scale.runner_config(scale.sizes), "graph_sizes": scale.sizes}),
            RunnerLimits(
                model=folder,
                capture=True,
                max_running=scale.sizes[-1],
                max_step_tokens=scale.max_step_tokens,
                block_tokens=scale.block_tokens,
                num_blocks=num_blocks,
                pipeline_depth=2,
            ),
        )
        rig.capacity = await rig.runner.open()
        step_model: Any = rig.runner._step_model
        moe: Any = rig.runner._moe
        rig.step_model, rig.moe = step_model, moe
        rig.device = step_model.model.device
        rig.services = make_services(rig.device)
        say(f"opened: {rig.capacity.notes}")
        rig.pool = KVPool(step_model.layout, num_blocks, scale.block_tokens, rig.device)
        order = np.random.default_rng(1).permutation(num_blocks).reshape(scale.sizes[-1], scale.blocks_each)
        rig.blocks = [list(map(int, row)) for row in order]
        rig.prompts = scale.prompts(scale.sizes[-1])
        rig.routers = [step_model.model.get_submodule(name.rpartition(".")[0]).gate for name in moe.names]
        rig.arena = AuxArena.create(num_blocks, scale.block_tokens, rig.capacity.aux_specs)
        for rows in rig.arena.rows.values():
            rows.fill(0)
        rig.arms = {}
        if "off" in names:
            fused = fuse_routers(step_model.model, moe)
            _all_fused(len(fused.rows), moe, fused.notes)
            rig.arms["off"] = Arm(rig, "off", None, None)
            fused.undo()
            say("arm off: captured")
        rig.capture = RoutingCapture(step_model.model, moe, scale.max_step_tokens, fuse=True)
        _all_fused(0 if rig.capture._fused is None else len(rig.capture._fused.rows), moe, rig.capture.notes)
        rig.arms["on"] = Arm(rig, "on", rig.capture, rig.arena)
        say("arm on: captured")
        return rig

    def __init__(self) -> None:
        self.runner: TransformersRunner
        self.capacity: Any
        self.step_model: Any
        self.moe: Any
        self.services: Any
        self.pool: KVPool
        self.blocks: list[list[int]]
        self.prompts: list[list[int]]
        self.routers: list[Any]
        self.arena: AuxArena
        self.capture: RoutingCapture

    def distinct_experts(self, count: int) -> float:
        """Experts that one decoded token of each of the first `count` sequences chose together; mean over layers."""
        size, position = self.scale.block_tokens, self.scale.context + self.scale.lead
        at = [self.blocks[key][position // size] * size + position % size for key in range(count)]
        rows = self.arena.rows["routing"][at]
        return float(np.mean([len(np.unique(rows[:, layer])) for layer in range(rows.shape[1])]))

    def floor_nbytes(self, count: int, experts: float | None = None) -> float:
        """Bytes that a decode step of `count` sequences must read: weights once, and KV of all contexts.

        `experts`: distinct ones of a layer; None: as many as are expected where routing is uniform. Of the
        embedding only the rows count; what is written (a row of KV for each) is left out.
        """
        config = self.scale.config
        total, k = config["num_experts"], config["num_experts_per_tok"]
        if experts is None:
            experts = total * (1 - (1 - k / total) ** count)
        dense = routed = 0
        for name, tensor in self.step_model.model.named_parameters():
            if "embed_tokens" in name:
                dense += count * tensor.shape[1] * tensor.element_size()
            elif ".experts." in name:
                routed += tensor.nbytes
            else:
                dense += tensor.nbytes
        kv = count * self.scale.context * int(self.step_model.layout.token_nbytes)
        return float(dense + routed * experts / total + kv)

    async def close(self) -> None:
        """Free everything on the device."""
        for arm in self.arms.values():
            await arm.executor.aclose()
            arm._forwards.clear()
        self.arms.clear()
        self.capture.close()
        for module in self.routers:
            module.__dict__.pop("forward", None)
        await self.runner.aclose()
        self.arena.close()
        del self.pool, self.step_model, self.routers, self.capture, self.runner


def _all_fused(count: int, moe: Any, notes: tuple[str, ...]) -> None:
    if count != len(moe.ids):
        raise RuntimeError(f"{count} of {len(moe.ids)} routers are fused, so the arms cannot be compared: {notes}")
