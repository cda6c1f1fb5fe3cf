"""A model that is loaded once, with arms over one pool of KV, whose steps are driven by hand.

An arm is a whole device path of its own (lane table, executor, CUDA graphs), with the routing captured or not, with
fixed numerics or not. All arms have the same routers, the same weights, the same KV blocks and the same block tables;
in the graphs of the arm "off" no router records. Where a step is no graph (prefill, everything on a CPU), routers
record in all. Drives the plugin's parts as `TransformersRunner.bind` does. Knows no figures. Used by `decode.py`
and by the commands that measure by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.capture.aux_producer import AuxSource
from fdasync_transformers.capture.routing import RoutingCapture
from fdasync_transformers.execution.bound import Bound
from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers
from fdasync_transformers.execution.states.plan import plan_size
from fdasync_transformers.model.kv import KVPool

from benchmarks.gpu.floor import bytes_of, distinct
from fdasync.cache.aux import ROUTING
from fdasync.cache.aux_arena import AuxArena
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.base import RunnerLimits
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import torch

    from benchmarks.gpu.floor import StepBytes
    from benchmarks.gpu.scale import Scale
    from fdasync.runner.base import StepOutput

GREEDY = SamplerSpec(prompt_len=0)
#: as a trainer's rollouts: temperature 1, raw log-probs of what was sampled
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, raw=True)
TOP_P = msgspec.structs.replace(SAMPLED, top_p=0.95)


class Arm:
    """One device path over the shared model and pool.

    Attributes:
        scale: of the rig.
        running: sequences that decode; keys below it.
        position: of the next token of every sequence.
        sampler: of sequences that start, but for their seeds.

    Args:
        captures: whether routing is recorded.
        step_model: of the arm alone; None: the rig's.
    """

    def __init__(self, rig: Rig, *, captures: bool, step_model: DeviceStepModel | None = None) -> None:
        self.scale = scale = rig.scale
        self.running = 0
        self.position = scale.context
        self.sampler = GREEDY
        self._rig = rig
        self._captures = captures
        self._step_model = step_model or rig.step_model
        self._aux = AuxData((rig.capture,) if captures else ())
        self._step_id = 0
        self.table = InputBatch(
            scale.sizes[-1], scale.blocks_each * scale.block_tokens, scale.block_tokens, len(rig.pool.blocks)
        )
        bound = Bound(
            pool=rig.pool,
            table=self.table,
            arena=rig.arena if captures else None,
            host=None,
            aux=self._aux,
            matchers=LaneMatchers(None, self.table),
            vocab_size=scale.config["vocab_size"],
            logits_dtype="float32",
        )
        self.select()
        self.executor = Executor(self._step_model, bound, rig.services)
        if rig.device.type == "cuda":
            self.executor.capture_graphs(scale.sizes)

    def select(self) -> None:
        """Steps that are no graphs are this arm's from now on."""
        self._step_model.aux = self._aux

    def _launch(self, **parts: Any) -> asyncio.Future[StepOutput]:
        self._step_id += 1
        if not self._captures and (parts.get("chunks") or self._rig.device.type == "cpu"):
            # routers record in both arms; graphs of this one were captured before
            self._rig.capture.begin()
        return self.executor.launch(RunStep(self._step_id, **parts))

    def prefill(self, keys: Sequence[int], cached: int, leaves: tuple[int, ...] = ()) -> asyncio.Future[StepOutput]:
        """Start these sequences, whose first `cached` tokens have KV, and forward the rest of their prompts."""
        size, context = self.scale.block_tokens, self.scale.context
        starts = []
        for key in keys:
            blocks = self._rig.blocks[key][: context // size]
            slots = tuple(blocks[cached // size :]) if self._captures else ()
            tokens = np.array(self._rig.prompts[key], "<i4").tobytes()
            sampler = msgspec.structs.replace(self.sampler, prompt_len=context, seed=key)
            starts.append(SeqStart(key, tokens, cached, tuple(blocks), slots, (1,) * len(slots), sampler))
        chunks = tuple(Chunk(key, context - cached, True) for key in keys)
        # those that have started stand by
        self.running -= len(leaves)
        skips = tuple(range(self.running))
        future = self._launch(leaves=leaves, starts=tuple(starts), skips=skips, chunks=chunks)
        self.running += len(keys)
        return future

    def decode(self, leaves: tuple[int, ...] = ()) -> asyncio.Future[StepOutput]:
        """Launch a decode step of all that run."""
        size = self.scale.block_tokens
        appends: tuple[BlockAppend, ...] = ()
        if self.position % size == 0:
            number = self.position // size
            new = [self._rig.blocks[key][number] for key in range(self.running)]
            slots = new if self._captures else [-1] * len(new)
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
            self.select()
            self.rewind()
            await self.decode(leaves)

    async def grow(self, count: int) -> None:
        """Let sequences that left come again, up to `count`; KV of all but the last block of each is still there."""
        if count > self.running:
            self.select()
            await self.prefill(range(self.running, count), self.scale.context - self.scale.block_tokens)

    async def sample_by(self, sampler: SamplerSpec) -> None:
        """Let all sequences leave and come again with this sampler; only their last block is computed anew."""
        self.sampler = sampler
        self.select()
        keys = tuple(range(self.running))
        await self.prefill(keys, self.scale.context - self.scale.block_tokens, leaves=keys)

    def rewind(self) -> None:
        """Forget what was decoded: every sequence is at the end of its prompt again. Nothing may be in flight.

        The device's tables keep what they hold: the token after the prompt is there, later ones are sampled anew.
        """
        lanes = [self.table.lane_of(key) for key in range(self.running)]
        self.table.length[lanes] = self.scale.context
        self.table.num_blocks[lanes] = self.scale.context // self.scale.block_tokens
        self.position = self.scale.context


class Rig:
    """One loaded model, one pool, and arms "on", "off" and "fixed"; `open` makes those that are named."""

    scale: Scale
    device: torch.device
    runner: TransformersRunner
    capacity: Any
    step_model: Any
    moe: Any
    services: Any
    pool: KVPool
    blocks: list[list[int]]
    prompts: list[list[int]]
    arena: AuxArena
    capture: RoutingCapture
    bytes: StepBytes
    arms: dict[str, Arm]

    @classmethod
    async def open(cls, scale: Scale, folder: str, names: Sequence[str], say: Callable[[str], None]) -> Rig:
        """Draw the weights, allocate the pool, capture graphs of all arms; no sequence has started."""
        rig = cls()
        rig.scale = scale
        num_blocks = scale.sizes[-1] * scale.blocks_each
        # on a CPU the library's default products of experts have no fixed order
        experts: dict[str, Any] = {"experts": "eager"} if "fixed" in names and scale.device == "cpu" else {}
        rig.runner = TransformersRunner(
            TransformersConfig(**scale.runner_config(scale.sizes), **experts),
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
        step_model: Any = rig.runner.opened.model.step_model
        moe: Any = rig.runner.opened.model.captured
        rig.step_model, rig.moe = step_model, moe
        rig.device = step_model.model.device
        rig.services = make_services(rig.device)
        say(f"opened: {rig.capacity.notes}")
        rig.pool = KVPool(step_model.layout, num_blocks, scale.block_tokens, rig.device)
        order = np.random.default_rng(1).permutation(num_blocks).reshape(scale.sizes[-1], scale.blocks_each)
        rig.blocks = [list(map(int, row)) for row in order]
        rig.prompts = scale.prompts(scale.sizes[-1])
        rig.bytes = bytes_of(step_model.model, moe, int(step_model.layout.token_nbytes), rig.capacity.snapshot_nbytes)
        if rig.capacity.state_specs:
            # stretches rewind positions and not states: figures of speed do not mind
            step_model.states = step_model.make_states(scale.sizes[-1])
            most = scale.sizes[-1]
            step_model.plan_size = plan_size(most, most, scale.max_step_tokens, scale.block_tokens)
        rig.arena = AuxArena.create(num_blocks, scale.block_tokens, rig.capacity.aux_specs)
        for rows in rig.arena.rows.values():
            rows.fill(0)
        rig.arms = {}
        # the same routers in both arms: the graphs of this one are captured while they record nothing
        routers = rig.runner.opened.model.routers
        if "off" in names:
            rig.arms["off"] = Arm(rig, captures=False)
            say("arm off: captured")
        rig.capture = RoutingCapture(ROUTING, AuxSource(step_model.model, moe, routers))
        rig.capture.attach(scale.max_step_tokens)
        fused = 0 if routers is None else len(routers.rows)
        say(f"{fused} of {len(moe.ids)} routers are fused")
        rig.arms["on"] = Arm(rig, captures=True)
        say("arm on: captured")
        if "fixed" in names:
            fixed = DeviceStepModel(
                step_model.model, step_model.layout, scale.sizes[-1], live=rig.runner.opened.model.live, fixed=True
            )
            rig.arms["fixed"] = Arm(rig, captures=True, step_model=fixed)
            say("arm fixed: captured")
        return rig

    def distinct_experts(self, count: int) -> float:
        """Experts of a layer that a step of the first `count` sequences chose, by the rows of the first timed steps of
        the stretch that arm "on" decoded last."""
        size, first = self.scale.block_tokens, self.scale.context + self.scale.lead
        at = [
            [self.blocks[key][position // size] * size + position % size for key in range(count)]
            for position in range(first, first + self.scale.trial)
        ]
        return distinct(self.arena.rows["routing"][np.array(at)], self.moe.num_experts)

    async def close(self) -> None:
        """Free everything on the device."""
        for arm in self.arms.values():
            await arm.executor.aclose()
        self.arms.clear()
        self.capture.close()
        await self.runner.aclose()
        self.arena.close()
        del self.pool, self.step_model, self.capture, self.runner
