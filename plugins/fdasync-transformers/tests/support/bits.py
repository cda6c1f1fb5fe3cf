"""Plays sequences through a step model, alone or mixed in chunks, and returns the logits of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kv import KVLayout, KVPool
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from step_driver import sampler_spec

from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


def step_model_of(family: str, dtype: torch.dtype, *, fixed: bool) -> StepModel:
    """A tiny model switched to paged attention, as a runner would on a CPU."""
    model = make_tiny_model(family).to(dtype)
    mends = families.mend(model)
    layers = probe.attention_layers(model, latent=True, query_scales=mends.query_scales)
    model.set_experts_implementation("eager")
    return StepModel(model, KVLayout(layers, dtype), fixed=fixed)


def prompts_of(step_model: StepModel, *lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    vocab = step_model.model.config.get_text_config().vocab_size
    return [random.integers(0, vocab, length) for length in lengths]


def play(
    step_model: StepModel, tokens: Sequence[np.ndarray], steps: Sequence[Sequence[tuple[int, int]]], block_tokens: int
) -> list[torch.Tensor]:
    """Logits [length, V] of each sequence; `steps` are (sequence, tokens), of which the last run of ones is decodes."""
    needed = [-(-len(ids) // block_tokens) for ids in tokens]
    order = np.random.default_rng(len(steps)).permutation(sum(needed) + 2)
    pool = KVPool(step_model.layout, len(order), block_tokens, step_model.model.device)
    pool.blocks.fill_(float("nan"))
    table = InputBatch(len(tokens), max(needed) * block_tokens, block_tokens, len(order))
    first = np.cumsum([0, *needed])
    logits: list[list[torch.Tensor]] = [[] for _ in tokens]
    decoding: list[int] = []
    for number, step in enumerate(steps):
        counts = dict(step)
        starts, chunks = [], []
        for key, count in step:
            if key in decoding:
                continue
            if not logits[key]:
                blocks = tuple(order[first[key] : first[key + 1]].tolist())
                spec = sampler_spec(len(tokens[key]))
                starts.append(SeqStart(key, tokens[key].astype("<i4").tobytes(), 0, blocks, (), (), spec))
            rest = max((dict(later).get(key, 0) for later in steps[number + 1 :]), default=0)
            chunks.append(Chunk(key, count, rest <= 1))
        decodes = [key for key in decoding if key in counts]
        skips = tuple(key for key in decoding if key not in counts)
        batch = table.plan(RunStep(number, starts=tuple(starts), skips=skips, chunks=tuple(chunks)))
        decoding += [chunk.key for chunk in chunks if chunk.last]
        rows = [*decodes, *(chunk.key for chunk in chunks)]
        out = step_model.run(batch, table, pool, np.arange(sum(counts[key] for key in rows)))
        for key, part in zip(rows, out.split([counts[key] for key in rows]), strict=True):
            logits[key].append(part)
    return [torch.cat(parts) for parts in logits]
