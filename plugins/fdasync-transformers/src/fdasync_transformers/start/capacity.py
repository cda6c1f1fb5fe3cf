"""What a model that was opened offers the engine: its facts, how many blocks fit into memory, how fast prefill is.

Measures at start-up. Knows models by their steps; knows no requests. Called by `opened_runner.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fdasync.errors import ConfigError
from fdasync.events.actions import Chunk, RunStep, SeqStart
from fdasync.request import SamplerSpec
from fdasync.runner.base import Capacity
from fdasync.runner.input_batch import InputBatch
from fdasync_transformers.execution.graphs import decode_rows
from fdasync_transformers.model.families import decoder_layers
from fdasync_transformers.model.head import decoder_of
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.model.recurrent.states import versions_of
from fdasync_transformers.sampling.scoring import SCORE_ROWS
from fdasync_transformers.start.indexed import chosen_shape
from fdasync_transformers.start.runner_config import graph_tokens, memory_share
from fdasync_transformers.weights import identity, loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.aux import AuxSpec
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.model_memory import ModelMemory
    from fdasync_transformers.execution.step import StepModel
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.start.open_model import Opened
    from fdasync_transformers.start.runner_config import TransformersConfig

# shares of the free memory; other processes of the machine need the rest of a CPU's
_CPU_SHARE = 0.5
_GPU_SHARE = 0.92
# bytes that a process takes of a GPU at its start: context, kernels, libraries
_CONTEXT_NBYTES = 1 << 30

# of a row's two jobs: 8,192 ids between the bounds of a cut, the peaks of 2^18 ids' chunks, 20 chunks of alternatives
_SAMPLER_ROW_NBYTES = 256 << 10

# the share of the blocks' memory for snapshots of recurrent state, and how many a small memory has
_SNAPSHOT_SHARE, _LEAST_SNAPSHOTS = 0.5, 16

# enough to measure the cost of a token, and few enough for a quick start
_SPEED_TOKENS = 256

_GREEDY = SamplerSpec(prompt_len=0)


def capacity_of(
    opened: Opened,
    checkpoint: loading.Checkpoint,
    config: TransformersConfig,
    limits: RunnerLimits,
    collectives: Collectives | None,
    memory: ModelMemory,
    *,
    aux_specs: tuple[AuxSpec, ...],
    grammars: bool,
    notes: Sequence[str],
) -> Capacity:
    """Measure and describe. All ranks of a group make the same calls; the other arguments are the runner's.

    Args:
        aux_specs: of what its steps record.
        grammars: whether there are any for this model.

    Raises ConfigError: not even one block fits.
    """
    step_model, moe = opened.step_model, opened.captured
    model, layout, recurrent = step_model.model, step_model.layout, step_model.recurrent
    max_context, block_tokens = opened.max_context_tokens, opened.block_tokens
    num_blocks = limits.num_blocks or _choose_num_blocks(opened, config, limits, memory.held_nbytes)
    uneven = moe is not None and len(set(moe.top_k)) > 1
    return Capacity(
        model=f"{checkpoint.folder.name} ({checkpoint.model_type})",
        fingerprint=identity.fingerprint(model, limits.numerics),
        weights_id=identity.DRAWN_ID
        if config.weights == "random"
        else identity.whole_weights_id(opened.names, collectives),
        vocab_size=int(model.config.vocab_size),
        eos_ids=loading.eos_ids(checkpoint),
        max_context_tokens=max_context,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        block_nbytes=block_tokens * layout.token_nbytes,
        kv_layout=layout.name,
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        dtype=str(model.dtype).removeprefix("torch."),
        aux_specs=aux_specs,
        state_specs=() if recurrent is None else recurrent.layout.specs,
        num_snapshots=_choose_num_snapshots(opened, limits, num_blocks),
        moe_layer_ids=() if moe is None else moe.ids,
        num_hidden_layers=len(decoder_layers(model)),
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else max(moe.top_k),
        top_k_by_layer=moe.top_k if moe is not None and uneven else None,
        tokenizer="transformers" if (checkpoint.folder / "tokenizer.json").exists() else "",
        grammars=grammars,
        processors=config.processors,
        scores_prompts=decoder_of(model) is not None,
        chosen=chosen_shape(model),
        routing_debug=limits.routing_debug and moe is not None,
        prefill_tokens_per_s=prefill_tokens_per_s(opened, limits),
        numerics=limits.numerics,
        sum_slices=limits.sum_slices,
        tensor_parallel=limits.tensor_parallel,
        max_run_tokens=1 + limits.speculation,
        drafter="mtp" if config.mtp and limits.speculation else "",
        no_sleep="other instances of this machine have its blocks mapped: use another transport than device"
        if limits.shows_blocks
        else memory.no_sleep,
        notes=tuple(notes),
    )


def _choose_num_blocks(opened: Opened, config: TransformersConfig, limits: RunnerLimits, held_nbytes: int) -> int:
    """Blocks that fit into the memory of the configuration, or into this runner's share of what is free; at most as
    many as all lanes can use. Raises ConfigError when not even one block fits."""
    step_model, block_tokens = opened.step_model, opened.block_tokens
    useful = limits.max_running * -(-opened.max_context_tokens // block_tokens)
    block_nbytes = block_tokens * step_model.layout.held_token_nbytes
    nbytes = config.kv_cache_nbytes
    if nbytes is None:
        model = step_model.model
        share = memory_share(config, limits, model.device)
        graphs = len(graph_tokens(config, limits, model, opened.experts)) if config.cuda_graphs else 0
        nbytes = _free_nbytes(opened, limits, share, graphs, held_nbytes)
    beside = 0
    if step_model.recurrent is not None:
        # live states of each lane, and snapshots
        state = step_model.recurrent.layout.nbytes
        beside = limits.max_running * versions_of(limits.speculation) * state
        kept = max(int((nbytes - beside) * _SNAPSHOT_SHARE), _LEAST_SNAPSHOTS * state)
        beside += kept if limits.num_snapshots is None else limits.num_snapshots * state
    if nbytes - beside < block_nbytes:
        states, hint = "", "give more, or a smaller model"
        if beside:
            live = limits.max_running * versions_of(limits.speculation)
            states = f" beside {beside} bytes of recurrent state, of which {live} are live"
            hint = "give more, or fewer running sequences, drafts or snapshots"
        problem = f"{nbytes} bytes hold no block of {block_nbytes}{states}"
        raise ConfigError("kv_cache_nbytes", problem, hint=hint)
    return min(useful, (nbytes - beside) // block_nbytes)


def _choose_num_snapshots(opened: Opened, limits: RunnerLimits, num_blocks: int) -> int:
    """Places of snapshots: asked for, or as many as take the bytes of the blocks, at most one for each block."""
    recurrent = opened.step_model.recurrent
    if recurrent is None:
        return 0
    if limits.num_snapshots is not None:
        return limits.num_snapshots
    nbytes = num_blocks * opened.block_tokens * opened.step_model.layout.held_token_nbytes
    return min(num_blocks, max(_LEAST_SNAPSHOTS, nbytes // recurrent.layout.nbytes))


def _free_nbytes(opened: Opened, limits: RunnerLimits, share: float, graphs: int, held_nbytes: int) -> int:
    """Of the memory the share of this runner: the rest is for others that start at the same time. `graphs`: how many
    steps with prompts will be captured; `held_nbytes`: that this runner has on the device beside torch's."""
    step_model = opened.step_model
    device = step_model.model.device
    if device.type != "cuda":
        return int(_free_host_nbytes() * _CPU_SHARE * share)
    peak = _step_peak_nbytes(opened, limits)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share < 1:
        # the other runners may not have taken their shares yet
        free = min(free, int(total * share) - torch.cuda.memory_reserved(device) - held_nbytes - _CONTEXT_NBYTES)
    beside = _beside_nbytes(opened, limits)
    if graphs:
        # graphs keep the memory of a step for good, and each the logits of as many rows as may sample
        logits = decode_rows(limits) * int(step_model.model.config.vocab_size) * step_model.layout.dtype.itemsize
        beside += peak + graphs * logits
    return int(free * _GPU_SHARE) - peak - beside


def _beside_nbytes(opened: Opened, limits: RunnerLimits) -> int:
    """Bytes that a runner keeps on the device beside model and KV, and the most that sampling takes."""
    step_model, block_tokens = opened.step_model, opened.block_tokens
    vocab = int(step_model.model.config.vocab_size)
    columns = -(-opened.max_context_tokens // block_tokens)
    tables = limits.max_running * columns * (1 + block_tokens) * 4
    # the logits of every captured size, together at most twice the largest's, in the model's dtype; steps with drafts
    # have graphs of their own
    rows = decode_rows(limits)
    graphs = 2 * (rows + (limits.max_running if limits.speculation else 0)) * vocab * step_model.layout.dtype.itemsize
    if step_model.mtp is not None and limits.speculation:
        # of the passes that draft, whose graphs share one place; states of two passes, and of every lane
        hidden = int(step_model.model.config.hidden_size)
        graphs += limits.max_running * (vocab + 4 * hidden * step_model.mtp.layers) * step_model.layout.dtype.itemsize
    # penalised logits with a count and a bit for each token; a row's sums, lists of ids and alternatives
    sampling = rows * (vocab * (4 + 4 + 1) + _SAMPLER_ROW_NBYTES)
    # float32 logits and log-probs, and the masks, places and values of alternatives
    scoring = SCORE_ROWS * vocab * (4 + 4 + 16)
    return tables + graphs + max(sampling, scoring)


def _step_peak_nbytes(opened: Opened, limits: RunnerLimits) -> int:
    """Device memory that the largest step takes beside model and KV, measured by running it."""
    step_model, left = opened.step_model, limits.max_step_tokens
    counts: list[int] = []
    while left and len(counts) < limits.max_running:
        counts.append(min(left, opened.max_context_tokens))
        left -= counts[-1]
    device = step_model.model.device
    batch, table, pool = fresh_prefills(step_model, counts, opened.block_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # float32 logits of as many rows as may sample
    step_model.run(batch, table, pool, np.arange(min(decode_rows(limits), sum(counts)))).float()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def prefill_tokens_per_s(opened: Opened, limits: RunnerLimits) -> float:
    """Speed of one prefill of some hundred tokens, the better of two, since the first warms up. 0: not measured."""
    step_model = opened.step_model
    if step_model.interpreted:
        return 0.0
    count = min(_SPEED_TOKENS, limits.max_step_tokens, opened.max_context_tokens)
    took = []
    for _ in range(2):
        batch, table, pool = fresh_prefills(step_model, [count], opened.block_tokens)
        started = time.perf_counter()
        step_model.run(batch, table, pool, np.arange(1)).float().cpu()
        took.append(time.perf_counter() - started)
    return count / min(took)


def fresh_prefills(step_model: StepModel, counts: list[int], block_tokens: int) -> tuple[Batch, InputBatch, KVPool]:
    """A step that prefills sequences of these lengths, and a pool of its own for it."""
    needed = [-(-count // block_tokens) for count in counts]
    pool = KVPool(step_model.layout, sum(needed), block_tokens, step_model.model.device)
    table = InputBatch(len(counts), max(counts), block_tokens, sum(needed))
    step_model.states = step_model.make_states(len(counts))
    starts = []
    for key, count in enumerate(counts):
        blocks = tuple(range(sum(needed[:key]), sum(needed[: key + 1])))
        starts.append(
            SeqStart(
                key=key, tokens=bytes(4 * count), num_cached=0, blocks=blocks, slots=(), generations=(), sampler=_GREEDY
            )
        )
    chunks = tuple(Chunk(key, count, False) for key, count in enumerate(counts))
    return table.plan(RunStep(0, starts=tuple(starts), chunks=chunks)), table, pool


def _free_host_nbytes() -> int:
    """Free memory of this machine, or of its control group where that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
    return max(0, available)
