"""Drives a runner by hand-made steps, as a scheduler would: scattered blocks, chunks, late arrivals.

Small and obvious on purpose. Blocks and slots are handed out from shuffled lists, and slot numbers never
equal block numbers, so that a runner that mixes them up is found out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner

from fdasync.cache.aux_arena import AuxArena
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from fdasync.cache.host_arena import HostArena
    from fdasync.ipc.exchange import Exchange

GREEDY = {"temperature": 0.0}


def sampler_spec(prompt_len: int, **overrides: Any) -> SamplerSpec:
    return SamplerSpec(prompt_len=prompt_len, **({"seed": 1} | overrides))


@dataclass
class Sequence:
    key: int
    prompt: list[int]
    max_tokens: int
    arrival: int
    spec: SamplerSpec
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: list[tuple[int, int]] = field(default_factory=list)
    planned: int = 0
    raw: list[float] = field(default_factory=list)


class Driver:
    """An open and bound runner, and the block tables that a scheduler would keep for it."""

    def __init__(self, runner: TransformersRunner, capacity: Any, arena: AuxArena | None, seed: int = 0) -> None:
        self.runner = runner
        self.capacity = capacity
        self.arena = arena
        shuffle = random.Random(seed)
        self.free_blocks = list(range(capacity.num_blocks))
        shuffle.shuffle(self.free_blocks)
        self.free_slots = list(range(capacity.num_blocks + 3))
        shuffle.shuffle(self.free_slots)
        self.generation = 1
        self.step_id = 0
        self.key = 0

    @classmethod
    async def open(
        cls,
        folder: Any,
        *,
        config: dict[str, Any] | None = None,
        seed: int = 0,
        exchange: Exchange | None = None,
        host: HostArena | None = None,
        **limits: Any,
    ) -> Driver:
        """`exchange`: of a group, whose ranks each have a driver that makes the same steps."""
        ranks = {} if exchange is None else {"tensor_parallel": exchange.ranks, "rank": exchange.rank}
        values = {"max_running": 4, "max_step_tokens": 128, "block_tokens": 4, "num_blocks": 64, **ranks, **limits}
        if "kernels" in (config or {}) and not torch.cuda.is_available():
            # kernels launch a program for each part of a context: two, and not as many as fit a processor
            values.setdefault("max_context_tokens", 64)
        runner = TransformersRunner(
            TransformersConfig(**{"dtype": "float32", "device": "cpu", **(config or {})}),
            RunnerLimits(model=str(folder), **values),
        )
        if exchange is not None:
            runner.join(exchange)
        try:
            capacity = await runner.open()
        except BaseException:
            await runner.aclose()
            raise
        arena = None
        if capacity.aux_specs and not runner.limits.rank:
            arena = AuxArena.create(capacity.num_blocks + 3, capacity.block_tokens, capacity.aux_specs)
        await runner.bind(capacity.num_blocks, arena, host)
        return cls(runner, capacity, arena, seed)

    async def close(self) -> None:
        await self.runner.aclose()
        if self.arena is not None:
            self.arena.close()

    def sequence(self, prompt: list[int], max_tokens: int, arrival: int = 0, **spec: Any) -> Sequence:
        self.key += 1
        return Sequence(self.key, list(prompt), max_tokens, arrival, sampler_spec(len(prompt), **spec))

    async def run(self, sequences: list[Sequence], chunks: int = 1) -> None:
        """Run all to their end: each prompt in `chunks` pieces, decodes mixed with them."""
        running: list[Sequence] = []
        decoding: list[Sequence] = []
        waiting = list(sequences)
        turn = 0
        leaves: tuple[int, ...] = ()
        while waiting or running:
            starts = []
            for seq in [s for s in waiting if s.arrival <= turn]:
                waiting.remove(seq)
                running.append(seq)
                starts.append(self.start(seq))
            appends = [a for seq in decoding for a in self.append(seq)]
            batch = list(decoding)
            pieces = []
            for seq in [s for s in running if s not in decoding]:
                count = min(-(-len(seq.prompt) // chunks), len(seq.prompt) - seq.planned)
                last = seq.planned + count == len(seq.prompt)
                seq.planned += count
                pieces.append(Chunk(seq.key, count, last))
                if last:
                    batch.append(seq)
                    decoding.append(seq)
            output = await self.step(leaves=leaves, starts=starts, appends=appends, chunks=pieces)
            for i, (seq, token) in enumerate(zip(batch, output.tokens, strict=True)):
                seq.tokens.append(token)
                if output.raw is not None:
                    seq.raw.append(output.raw[i])
            ended = [seq for seq in batch if len(seq.tokens) == seq.max_tokens]
            for seq in ended:
                running.remove(seq)
                decoding.remove(seq)
            leaves = tuple(seq.key for seq in ended)
            turn += 1
        if leaves:
            await self.step(leaves=leaves)

    def launch(
        self,
        *,
        leaves: Any = (),
        starts: Any = (),
        appends: Any = (),
        chunks: Any = (),
        skips: Any = (),
        drafts: Any = None,
    ):
        self.step_id += 1
        parts = (tuple(part) for part in (leaves, starts, appends, skips, chunks))
        return self.runner.launch(RunStep(self.step_id, *parts, drafts=drafts))

    async def step(self, **parts: Any):
        return await self.launch(**parts)

    def start(self, seq: Sequence, cached: list[int] | None = None) -> SeqStart:
        """Start a sequence, on `cached` leading blocks of another where given."""
        size = self.capacity.block_tokens
        known = seq.prompt + seq.tokens
        cached = cached or []
        seq.blocks = list(cached)
        seq.slots = []
        seq.planned = len(cached) * size
        while len(seq.blocks) * size < len(known):
            self._grow(seq)
        own = seq.slots
        return SeqStart(
            seq.key,
            np.array(known, "<i4").tobytes(),
            len(cached) * size,
            tuple(seq.blocks),
            tuple(slot for slot, _ in own),
            tuple(generation for _, generation in own),
            seq.spec,
        )

    def append(self, seq: Sequence, ahead: int = 0) -> list[BlockAppend]:
        """Blocks for the next token of a sequence, and so many drafts behind it."""
        appends = []
        while len(seq.blocks) * self.capacity.block_tokens < len(seq.prompt) + len(seq.tokens) + ahead:
            self._grow(seq)
            slot, generation = seq.slots[-1] if seq.slots else (-1, 0)
            appends.append(BlockAppend(seq.key, seq.blocks[-1], slot, generation))
        return appends

    def rows(self, seq: Sequence, name: str = "") -> Any:
        """Rows of a spec ("": the first one, the routing) of every position that this sequence forwarded itself."""
        count = len(seq.prompt) + len(seq.tokens) - 1
        size = self.capacity.block_tokens
        spec = next(spec for spec in self.capacity.aux_specs if name in ("", spec.name))
        # a sequence that was started on cached blocks has no slots for those
        own = len(seq.blocks) - len(seq.slots)
        rows = np.zeros((count - own * size, *spec.shape), spec.dtype)
        for number, (slot, generation) in enumerate(seq.slots):
            here = min(size, len(rows) - number * size)
            if here > 0:
                self.arena.copy_rows((slot,), (generation,), 0, here, {spec.name: rows}, number * size)
        return rows

    def _grow(self, seq: Sequence) -> None:
        seq.blocks.append(self.free_blocks.pop())
        if self.capacity.aux_specs:
            self.generation += 1
            seq.slots.append((self.free_slots.pop(), self.generation))
