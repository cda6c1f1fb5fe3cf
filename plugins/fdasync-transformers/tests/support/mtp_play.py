"""Plays sequences through a step model and its drafter by hand, with blocks of a shuffled pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.execution.model_memory import ModelMemory
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.mtp.drafter import MtpDrafter
from fdasync_transformers.start.open_model import open_model
from fdasync_transformers.start.runner_config import TransformersConfig
from fdasync_transformers.weights import loading
from step_driver import sampler_spec

from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.runner.base import RunnerLimits
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from pathlib import Path

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
    """A pool, a table and a drafter."""

    def __init__(self, opened: Any, seed: int = 0, run: int = 1, total: Any = None) -> None:
        self.model = opened.step_model
        self.size = opened.block_tokens
        self.pool = KVPool(self.model.layout, 64, self.size, CPU)
        # what an earlier sequence left must not matter
        self.pool.blocks.fill_(float("nan"))
        self.table = InputBatch(4, 64, self.size, 64, run)
        self.drafter = MtpDrafter(self.model, total)
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

    def step(
        self,
        order: list[Lane],
        starts: tuple[SeqStart, ...] = (),
        chunks: tuple[tuple[Lane, int], ...] = (),
        most: int = 0,
        leaves: tuple[int, ...] = (),
        appends: tuple[BlockAppend, ...] = (),
    ) -> None:
        """One step: `order` are the lanes that decode, `chunks` those of prompts, with their numbers of tokens."""
        self.step_id += 1
        pieces = tuple(Chunk(lane.key, count, lane.done + count == len(lane.known)) for lane, count in chunks)
        batch = self.table.plan(RunStep(self.step_id, leaves, starts, appends, (), pieces))
        lanes = [*order, *(lane for lane, _ in chunks)]
        rows = (np.cumsum(batch.counts) - 1)[batch.sampled]
        with self.model.head.keeping():
            logits = self.model.run(batch, self.table, self.pool, rows)
            wanted = np.zeros(len(lanes), np.int64)
            for index, token in zip(batch.sampled.tolist(), logits.argmax(-1).tolist(), strict=True):
                wanted[index] = most
                lane = lanes[index]
                end = int(batch.starts[index] + batch.counts[index])
                self.table.tokens[batch.lanes[index], end] = token
                lane.known.append(token)
            found = self.drafter.step(self.model.head.hidden, batch, batch.counts, wanted, self.table, self.pool)
        for lane, count, drafts in zip(lanes, found.counts.tolist(), found.tokens.tolist(), strict=True):
            lane.drafts = drafts[:count]
        for lane, count in zip(lanes, batch.counts.tolist(), strict=True):
            lane.done += count

    def verify(self, lane: Lane, guesses: list[int], most: int) -> int:
        """One step of a lane alone that forwards its last token and guesses behind it; how many samples stand."""
        self.step_id += 1
        row = self.table.lane_of(lane.key)
        self.table.tokens[row, lane.done + 1 : lane.done + 1 + len(guesses)] = guesses
        batch = self.table.plan(RunStep(self.step_id, (), (), (), (), ()))
        count = int(batch.counts[0])
        with self.model.head.keeping():
            logits = self.model.run(batch, self.table, self.pool, np.arange(count))
            samples = logits.argmax(-1).tolist()
            right = [guess == sample for guess, sample in zip(guesses, samples[: count - 1], strict=False)]
            stands = np.array([[*right, False].index(False) + 1])
            lane.known += samples[: int(stands[0])]
            lane.done += int(stands[0])
            self.table.tokens[row, lane.done] = lane.known[-1]
            self.table.take_runs(batch, stands)
            wanted = np.full(1, most)
            found = self.drafter.step(self.model.head.hidden, batch, stands, wanted, self.table, self.pool)
        lane.drafts = found.tokens[0].tolist()[: int(found.counts[0])]
        return int(stands[0])

    def mtp_bytes(self, block: int) -> list[torch.Tensor]:
        """What a block holds of the MTP layers."""
        indices = [layer.index for layer in self.model.layout.layers if layer.group]
        views = (self.pool.keys, self.pool.values)
        return [held[index][block].clone() for index in indices for held in views if index in held]
