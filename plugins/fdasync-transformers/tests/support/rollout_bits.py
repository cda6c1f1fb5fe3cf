"""Logits of a rollout with fixed numerics, and batches of the same sequences as a trainer lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kv import KVLayout, KVPool
from fdasync_transformers.weights.named import dtypes_of, served_layout
from step_driver import sampler_spec

from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.runner.input_batch import InputBatch

_BLOCK_TOKENS = 16


def served_in(model: Any, dtype: torch.dtype) -> Any:
    """The model, cast as a server of this dtype has it: what the library keeps in float32 stays so."""
    dtypes = dtypes_of(served_layout(model, dtype))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    return model


def drawn(lengths: tuple[int, ...], vocab_size: int = 250) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


def rollout_logits(model: Any, sequences: list[torch.Tensor], cut: int = 33) -> torch.Tensor:
    """Logits [tokens of all, V]: each sequence in two chunks, beside the others; the model is changed for good."""
    mends = families.mend(model)
    layers = probe.attention_layers(model, latent=True, query_scales=mends.query_scales)
    model.set_experts_implementation("eager")
    return played(StepModel(model, KVLayout(layers, model.dtype), fixed=True), sequences, cut)


def played(step_model: StepModel, sequences: list[torch.Tensor], cut: int) -> torch.Tensor:
    """Logits [tokens of all, V], on the host: each sequence in two chunks, the first of `cut` tokens."""
    device = step_model.model.device
    needs = [-(-len(tokens) // _BLOCK_TOKENS) for tokens in sequences]
    order = np.random.default_rng(0).permutation(sum(needs))
    pool = KVPool(step_model.layout, len(order), _BLOCK_TOKENS, device)
    table = InputBatch(len(sequences), max(needs) * _BLOCK_TOKENS, _BLOCK_TOKENS, len(order))
    own = np.split(order, np.cumsum(needs)[:-1])
    starts = tuple(
        SeqStart(
            k, tokens.numpy().astype("<i4").tobytes(), 0, tuple(own[k].tolist()), (), (), sampler_spec(len(tokens))
        )
        for k, tokens in enumerate(sequences)
    )
    firsts = [min(cut, len(tokens)) for tokens in sequences]
    rests = [len(tokens) - first for tokens, first in zip(sequences, firsts, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for number, counts in enumerate((firsts, rests)):
        chunks = tuple(Chunk(k, count, number == 1 or not rests[k]) for k, count in enumerate(counts) if count)
        leaves = tuple(k for k, rest in enumerate(rests) if number and not rest)
        step = RunStep(number, leaves=leaves, starts=() if number else starts, chunks=chunks)
        logits = step_model.run(table.plan(step), table, pool, np.arange(sum(counts))).clone().cpu()
        parts = torch.split(logits, [count for count in counts if count])
        for chunk, part in zip(chunks, parts, strict=True):
            found[chunk.key].append(part)
    return torch.cat([part for parts in found for part in parts])


def batch_of(sequences: list[torch.Tensor], layout: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a pass, and which tokens of its flattened batch are real; layout: left, right or packed."""
    lengths = [len(tokens) for tokens in sequences]
    if layout == "packed":
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": torch.cat(sequences)[None], "position_ids": positions}, torch.ones(sum(lengths)).bool()
    width = max(lengths) + 1
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        first = 0 if layout == "right" else width - len(tokens)
        ids[row, first : first + len(tokens)] = tokens
        mask[row, first : first + len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}, mask.bool().flatten()


def loss_of(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of logits [tokens, V], one number in which every logit counts in its own way."""
    return (torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1) * weights).sum()
