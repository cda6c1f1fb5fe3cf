"""Plays sequences of a model with recurrent layers through a step model, with snapshots, by hand-made steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.model import probe
from fdasync_transformers.model.kv import KVLayout, KVPool
from fdasync_transformers.model.recurrent.pieces import Take
from fdasync_transformers.model.recurrent.probe import find_state
from step_driver import sampler_spec

from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 8
_BLOCKS, _LANES, _PLACES = 32, 4, 4


class Player:
    """A step model with a pool, tables and states, all full of NaN before they are written."""

    def __init__(self, model: Any) -> None:
        model.set_experts_implementation("eager")
        state = find_state(model)
        assert state is not None
        layers = probe.attention_layers(model, latent=True, query_scales={})
        self.model = StepModel(model, KVLayout(layers, model.dtype), state=state)
        self.pool = KVPool(self.model.layout, _BLOCKS, BLOCK, model.device)
        self.pool.blocks.fill_(float("nan"))
        self.states = self.model.states = self.model.make_states(_LANES, _PLACES)
        assert self.states is not None
        self.states.memory.fill_(0xFF)
        self.table = InputBatch(_LANES, 64, BLOCK, _BLOCKS)
        self._step = 0

    def step(
        self,
        *,
        starts: Sequence[SeqStart] = (),
        chunks: Sequence[tuple[int, int, bool]] = (),
        takes: Sequence[tuple[int, int, int]] = (),
        leaves: Sequence[int] = (),
        skips: Sequence[int] = (),
    ) -> torch.Tensor:
        """Logits of all tokens; chunks are (key, count, last), takes are (key, position, place)."""
        self._step += 1
        parts = {"starts": tuple(starts), "leaves": tuple(leaves), "skips": tuple(skips)}
        batch = self.table.plan(RunStep(self._step, chunks=tuple(Chunk(*chunk) for chunk in chunks), **parts))
        assert self.states is not None
        for start in starts:
            self.states.check_start(start.snapshot, start.num_cached)
            if start.snapshot >= 0:
                self.states.begin(self.table.lane_of(start.key), start.snapshot)
        taken = [Take(self.table.lane_of(key), position, place) for key, position, place in takes]
        rows = np.arange(int(batch.counts.sum()))
        return self.model.run(batch, self.table, self.pool, rows, taken).clone()


def start(key: int, tokens: Sequence[int], blocks: Sequence[int], cached: int = 0, snapshot: int = -1) -> SeqStart:
    """A sequence whose tokens are all known, so that "decodes" take the next of them."""
    packed = np.array(tokens, "<i4").tobytes()
    return SeqStart(key, packed, cached, tuple(blocks), (), (), sampler_spec(len(tokens)), snapshot)


def plain(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
