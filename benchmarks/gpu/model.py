"""The model of `gpu_serving`, loaded once, with two arms over one pool of KV.

An arm is a whole device path of its own (lane table, executor, CUDA graphs), with the routing captured or not, with
fixed numerics or not. All arms have the same routers, the same weights, the same KV blocks and the same block tables;
in the graphs of the arm "off" no router records. Where a step is no graph (prefill, everything on a CPU), routers
record in all. Drives the plugin's parts by hand, as `TransformersRunner.bind` does. Knows no figures.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.capture.routing import RoutingCapture
from fdasync_transformers.execution.device_executor import DeviceExecutor
from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.execution.executor import Bound
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.lane_matchers import LaneMatchers
from fdasync_transformers.execution.states.plan import plan_size
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.weights import loading

from benchmarks.gpu.floor import bytes_of, distinct
from benchmarks.gpu.skew import find_skew
from fdasync.cache.aux_arena import AuxArena
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.base import RunnerLimits
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.floor import StepBytes
    from benchmarks.gpu.scale import Scale
    from benchmarks.gpu.skew import Skew
    from fdasync.runner.base import StepOutput

GREEDY = SamplerSpec(0, 0, 0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, (), False, False, 0)
#: as a trainer's rollouts: temperature 1, raw log-probs of what was sampled
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, raw=True)
TOP_P = msgspec.structs.replace(SAMPLED, top_p=0.95)


class Arm:
    """One device path over the shared model and pool.

    Attributes:
        name: for people.
        running: sequences that decode; keys below it.
        position: of the next token of every sequence.
        sampler: of sequences that start, but for their seeds.
    """

    def __init__(
        self,
        rig: Rig,
        name: str,
        capture: RoutingCapture | None,
        arena: AuxArena | None,
        step_model: DeviceStepModel | None = None,
    ) -> None:
        """`step_model`: None: the rig's."""
        scale = rig.scale
        self._step_model = step_model or rig.step_model
        self.name = name
        self.capture = capture
        self.aux = None if capture is None else AuxData((capture,))
        self.running = 0
        self.position = scale.context
        self.sampler = GREEDY
        self._rig = rig
        self._step_id = 0
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
        self.executor = DeviceExecutor(self._step_model, bound, rig.services)
        if rig.device.type == "cuda":
            self.executor.capture_graphs(scale.sizes)

    def select(self) -> None:
        """Steps that are no graphs are this arm's from now on."""
        self._step_model.aux = self.aux

    def _launch(self, **parts: Any) -> asyncio.Future[StepOutput]:
        self._step_id += 1
        if self.capture is None and (parts.get("chunks") or self._rig.device.type == "cpu"):
            # routers record in both arms; graphs of this one were captured before
            self._rig.capture.begin()
        return self.executor.launch(RunStep(self._step_id, **parts))

    def prefill(self, keys: Sequence[int], cached: int, leaves: tuple[int, ...] = ()) -> asyncio.Future[StepOutput]:
        """Start these sequences, whose first `cached` tokens have KV, and forward the rest of their prompts."""
        size, context = self._rig.scale.block_tokens, self._rig.scale.context
        starts = []
        for key in keys:
            blocks = self._rig.blocks[key][: context // size]
            slots = tuple(blocks[cached // size :]) if self.capture is not None else ()
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
            self.select()
            self.rewind()
            await self.decode(leaves)

    async def grow(self, count: int) -> None:
        """Let sequences that left come again, up to `count`; KV of all but the last block of each is still there."""
        if count > self.running:
            self.select()
            await self.prefill(range(self.running, count), self._rig.scale.context - self._rig.scale.block_tokens)

    async def sample_by(self, sampler: SamplerSpec) -> None:
        """Let all sequences leave and come again with this sampler; only their last block is computed anew."""
        self.sampler = sampler
        self.select()
        keys = tuple(range(self.running))
        await self.prefill(keys, self._rig.scale.context - self._rig.scale.block_tokens, leaves=keys)

    def rewind(self) -> None:
        """Forget what was decoded: every sequence is at the end of its prompt again. Nothing may be in flight.

        The device's tables keep what they hold: the token after the prompt is there, later ones are sampled anew.
        """
        lanes = [self.table.lane_of(key) for key in range(self.running)]
        self.table.length[lanes] = self._rig.scale.context
        self.table.num_blocks[lanes] = self._rig.scale.context // self._rig.scale.block_tokens
        self.position = self._rig.scale.context


class Rig:
    """One loaded model, one pool, and arms "on", "off" and "fixed"; `open` makes those that are named."""

    scale: Scale
    device: torch.device
    arms: dict[str, Arm]

    @classmethod
    async def open(
        cls, scale: Scale, folder: str, names: Sequence[str], say: Callable[[str], None], *, skew: bool = False
    ) -> Rig:
        """Draw the weights, allocate the pool, capture graphs of both arms; no sequence has started. `skew`: find
        first what `skew` is to write, in a model of its own.
        """
        rig = cls()
        rig.scale = scale
        if skew:
            rig.skew = _find_skew(scale, folder)
            say(f"skew found: spread of logits {min(rig.skew.logits):.3f} to {max(rig.skew.logits):.3f}")
        num_blocks = scale.sizes[-1] * scale.blocks_each
        # on a CPU the library's default products of experts have no fixed order
        experts = {"experts": "eager"} if "fixed" in names and scale.device == "cpu" else {}
        rig.runner = TransformersRunner(
            TransformersConfig(**{**scale.runner_config(scale.sizes), "graph_sizes": scale.sizes, **experts}),
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
        routers = rig.runner._routers
        if "off" in names:
            rig.arms["off"] = Arm(rig, "off", None, None)
            say("arm off: captured")
        rig.capture = RoutingCapture(step_model.model, moe, scale.max_step_tokens, routers=routers)
        fused = 0 if routers is None else len(routers.rows)
        say(f"{fused} of {len(moe.ids)} routers are fused")
        rig.arms["on"] = Arm(rig, "on", rig.capture, rig.arena)
        say("arm on: captured")
        if "fixed" in names:
            fixed = DeviceStepModel(
                step_model.model, step_model.layout, scale.sizes[-1], live=rig.runner._live, fixed=True
            )
            rig.arms["fixed"] = Arm(rig, "fixed", rig.capture, rig.arena, fixed)
            say("arm fixed: captured")
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
        self.arena: AuxArena
        self.capture: RoutingCapture
        self.bytes: StepBytes
        self.skew: Skew | None = None

    def distinct_experts(self, count: int, steps: int) -> list[float]:
        """Experts of each layer that a step of the first `count` sequences chose, mean over the timed steps of the
        stretch that arm "on" decoded last."""
        size, first = self.scale.block_tokens, self.scale.context + self.scale.lead
        at = [
            [self.blocks[key][position // size] * size + position % size for key in range(count)]
            for position in range(first, first + steps)
        ]
        return distinct(self.arena.rows["routing"][np.array(at)], self.moe.num_experts)

    async def set_skew(self, on: bool) -> None:
        """Write the routers' bias to the weights, or take it away; sequences of arm "on" come again. Nothing may be in
        flight. Raises RuntimeError where the rig was opened without it."""
        if self.skew is None:
            raise RuntimeError("the rig was opened without a skew")
        (self.skew.apply if on else self.skew.undo)(self.step_model.model)
        if self.device.type == "cuda":
            # steps run on another stream
            torch.cuda.synchronize(self.device)
        await self.arms["on"].sample_by(GREEDY)

    async def close(self) -> None:
        """Free everything on the device."""
        for arm in self.arms.values():
            await arm.executor.aclose()
        self.arms.clear()
        self.capture.close()
        await self.runner.aclose()
        self.arena.close()
        del self.pool, self.step_model, self.capture, self.runner


def _router_beside(model: Any, experts: str) -> str:
    """Name of the router's module."""
    block = experts.rpartition(".")[0]
    return f"{block}.gate" if hasattr(model.get_submodule(block), "gate") else f"{block}.router"


def _find_skew(scale: Scale, folder: str) -> Skew:
    """By a model as the library has it, with the weights that the runner will draw; given back before that."""
    device = torch.device(scale.device)
    model: Any = loading.draw(loading.read_checkpoint(folder, with_tensors=False), scale.dtype, device)
    routers = [_router_beside(model, experts.name) for experts in find_experts(model).values()]
    tokens = min(scale.context, 256)
    prompts = max(4, scale.max_step_tokens // (2 * tokens))
    found = find_skew(model, routers, scale.skew, prompts=prompts, tokens=tokens)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found
