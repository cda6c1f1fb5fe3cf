"""Plays sequences through the executor of a model with MTP layers, by hand-made steps in blocks of a shuffled pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.capture.aux_data import AuxData
from fdasync_transformers.execution.bound import Bound
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.model_memory import ModelMemory
from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.start.open_model import open_model
from fdasync_transformers.start.runner_config import TransformersConfig
from fdasync_transformers.weights import loading
from step_driver import sampler_spec

from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.runner.base import RunnerLimits
from fdasync.runner.input_batch import InputBatch
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import runs_of

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.parallel.collectives import Collectives

CPU = torch.device("cpu")
LIMITS = {"max_running": 4, "max_step_tokens": 128, "block_tokens": 4, "max_context_tokens": 64, "num_blocks": 64}


def open_mtp(
    folder: Path, config: dict[str, Any] | None = None, collectives: Collectives | None = None, **limits: Any
) -> Any:
    """An `Opened` model with its MTP layers, in float32 on a CPU; with `collectives` one rank's part of it."""
    if collectives is not None:
        limits |= {"rank": collectives.rank, "tensor_parallel": collectives.ranks}
    checkpoint = loading.read_checkpoint(str(folder))
    settings = TransformersConfig(**{"dtype": "float32", "device": "cpu", "mtp": True, **(config or {})})
    known = RunnerLimits(model=str(folder), **{**LIMITS, **limits})
    return open_model(checkpoint, settings, known, ModelMemory(CPU), collectives)


@dataclass
class Lane:
    key: int
    known: list[int]
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    drafts: list[int] = field(default_factory=list)


class Play:
    """A pool, and an executor of steps whose layers draft up to `speculation` tokens; made on a running loop."""

    def __init__(
        self, opened: Any, seed: int = 0, speculation: int = 4, collectives: Collectives | None = None
    ) -> None:
        self.model = opened.step_model
        self.size = opened.block_tokens
        self.pool = KVPool(self.model.layout, 64, self.size, CPU)
        # what an earlier sequence left must not matter
        self.pool.blocks.fill_(float("nan"))
        self.table = InputBatch(4, 64, self.size, 64, 1 + speculation)
        bound = Bound(
            pool=self.pool,
            table=self.table,
            arena=None,
            host=None,
            aux=AuxData(),
            matchers=LaneMatchers(None, self.table),
            vocab_size=int(self.model.model.config.vocab_size),
            logits_dtype="float32",
            collectives=collectives,
            speculation=speculation,
        )
        self.executor = Executor(self.model, bound, make_services(CPU, by_kernels=False))
        # tables of the lanes, as a device has them
        self.lanes: DeviceLanes = self.executor.passes._lanes
        self.free = list(range(64))
        random.Random(seed).shuffle(self.free)
        self.step_id = 0

    def start(self, key: int, tokens: list[int], cached: tuple[int, ...] = (), ahead: int = 2) -> tuple[Lane, SeqStart]:
        lane = Lane(key, list(tokens), [*cached], len(cached) * self.size)
        lane.blocks += [self.free.pop() for _ in range(-(-len(tokens) // self.size) + ahead - len(cached))]
        start = SeqStart(
            key, np.array(tokens, "<i4").tobytes(), lane.done, tuple(lane.blocks), (), (), sampler_spec(len(tokens))
        )
        return lane, start

    async def step(
        self,
        order: list[Lane],
        starts: tuple[SeqStart, ...] = (),
        chunks: tuple[tuple[Lane, int], ...] = (),
        most: int = 0,
        leaves: tuple[int, ...] = (),
        guesses: list[int] | None = None,
    ) -> list[int]:
        """One step: `order` are the lanes that decode, `chunks` those of prompts, with their numbers of tokens. Returns
        how many samples of each sampling sequence stand.

        `guesses` are verified behind the last token of the first lane instead of its layers' drafts."""
        self.step_id += 1
        pieces = tuple(Chunk(lane.key, count, lane.done + count == len(lane.known)) for lane, count in chunks)
        drafts = None if guesses is None else drafts_of({order[0].key: (order[0].done + 1, guesses, len(guesses))})
        step = RunStep(self.step_id, leaves, starts, (), (), pieces, drafts, own_drafts=most)
        output = await self.executor.launch(step)
        runs = runs_of(output)
        for lane, count in chunks:
            lane.done += count
        sampling = [*order, *(lane for lane, _ in chunks if lane.done == len(lane.known))]
        for lane, run in zip(sampling, runs, strict=True):
            lane.known += run
            if lane in order:
                lane.done += len(run)
            row = self.table.lane_of(lane.key)
            lane.drafts = self.lanes.tokens[row, lane.done + 1 :][: int(self.lanes.drafted[row])].tolist()
        return [len(run) for run in runs]

    def mtp_bytes(self, block: int) -> list[torch.Tensor]:
        """What a block holds of the MTP layers."""
        indices = [layer.index for layer in self.model.layout.layers if layer.group]
        views = (self.pool.keys, self.pool.values)
        return [held[index][block].clone() for index in indices for held in views if index in held]
