"""Measures at start-up how many KV blocks fit into memory, and how fast prefill is.

Knows models by their steps. Called by `runner.py`.
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
from fdasync.runner.input_batch import InputBatch
from fdasync_transformers.execution.graphs import decode_rows
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.model.recurrent.states import versions_of
from fdasync_transformers.sampling.scoring import SCORE_ROWS

if TYPE_CHECKING:
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.step import StepModel

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


def choose_num_blocks(
    step_model: StepModel,
    limits: RunnerLimits,
    max_context_tokens: int,
    block_tokens: int,
    nbytes: int | None,
    *,
    share: float = 1.0,
    graphs: int = 0,
    held: int = 0,
) -> int:
    """Blocks that fit into `nbytes`, at most as many as all lanes can use.

    Args:
        nbytes: None: the free memory, at most the share of this runner.
        share: of the memory; the rest is for other runners that start at the same time.
        graphs: how many steps with prompts will be captured.
        held: bytes that this runner has on the device beside torch's.

    Raises ConfigError when not even one block fits.
    """
    useful = limits.max_running * -(-max_context_tokens // block_tokens)
    block_nbytes = block_tokens * step_model.layout.held_token_nbytes
    if nbytes is None:
        nbytes = _free_nbytes(step_model, limits, max_context_tokens, block_tokens, share, graphs, held)
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


def choose_num_snapshots(step_model: StepModel, limits: RunnerLimits, num_blocks: int, block_tokens: int) -> int:
    """Places of snapshots: asked for, or as many as take the bytes of the blocks, at most one for each block."""
    if step_model.recurrent is None:
        return 0
    if limits.num_snapshots is not None:
        return limits.num_snapshots
    nbytes = num_blocks * block_tokens * step_model.layout.held_token_nbytes
    return min(num_blocks, max(_LEAST_SNAPSHOTS, nbytes // step_model.recurrent.layout.nbytes))


def _free_nbytes(
    step_model: StepModel,
    limits: RunnerLimits,
    max_context_tokens: int,
    block_tokens: int,
    share: float,
    graphs: int,
    held: int = 0,
) -> int:
    device = step_model.model.device
    if device.type != "cuda":
        return int(_free_host_nbytes() * _CPU_SHARE * share)
    peak = _step_peak_nbytes(step_model, limits, max_context_tokens, block_tokens)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share < 1:
        # the other runners may not have taken their shares yet
        free = min(free, int(total * share) - torch.cuda.memory_reserved(device) - held - _CONTEXT_NBYTES)
    beside = _beside_nbytes(step_model, limits, max_context_tokens, block_tokens)
    if graphs:
        # graphs keep the memory of a step for good, and each the logits of as many rows as may sample
        logits = decode_rows(limits) * int(step_model.model.config.vocab_size) * step_model.layout.dtype.itemsize
        beside += peak + graphs * logits
    return int(free * _GPU_SHARE) - peak - beside


def _beside_nbytes(step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int) -> int:
    """Bytes that a runner keeps on the device beside model and KV, and the most that sampling takes."""
    vocab = int(step_model.model.config.vocab_size)
    columns = -(-max_context_tokens // block_tokens)
    tables = limits.max_running * columns * (1 + block_tokens) * 4
    # the logits of every captured size, together at most twice the largest's, in the model's dtype; steps with drafts
    # have graphs of their own
    rows = decode_rows(limits)
    graphs = 2 * (rows + (limits.max_running if limits.speculation else 0)) * vocab * step_model.layout.dtype.itemsize
    if step_model.mtp_layers and limits.speculation:
        # of the passes that draft, whose graphs share one place; states of two passes, and of every lane
        hidden = int(step_model.model.config.hidden_size)
        graphs += limits.max_running * (vocab + 4 * hidden * step_model.mtp_layers) * step_model.layout.dtype.itemsize
    # penalised logits with a count and a bit for each token; a row's sums, lists of ids and alternatives
    sampling = rows * (vocab * (4 + 4 + 1) + _SAMPLER_ROW_NBYTES)
    # float32 logits and log-probs, and the masks, places and values of alternatives
    scoring = SCORE_ROWS * vocab * (4 + 4 + 16)
    return tables + graphs + max(sampling, scoring)


def _step_peak_nbytes(step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int) -> int:
    """Device memory that the largest step takes beside model and KV, measured by running it."""
    left = limits.max_step_tokens
    counts: list[int] = []
    while left and len(counts) < limits.max_running:
        counts.append(min(left, max_context_tokens))
        left -= counts[-1]
    device = step_model.model.device
    batch, table, pool = _fresh_prefills(step_model, counts, block_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # float32 logits of as many rows as may sample
    step_model.run(batch, table, pool, np.arange(min(decode_rows(limits), sum(counts)))).float()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def prefill_tokens_per_s(
    step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int
) -> float:
    """Speed of one prefill of some hundred tokens, the better of two, since the first warms up. 0: not measured."""
    if step_model.interpreted:
        return 0.0
    count = min(_SPEED_TOKENS, limits.max_step_tokens, max_context_tokens)
    took = []
    for _ in range(2):
        batch, table, pool = _fresh_prefills(step_model, [count], block_tokens)
        started = time.perf_counter()
        step_model.run(batch, table, pool, np.arange(1)).float().cpu()
        took.append(time.perf_counter() - started)
    return count / min(took)


def _fresh_prefills(step_model: StepModel, counts: list[int], block_tokens: int) -> tuple[Batch, InputBatch, KVPool]:
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
