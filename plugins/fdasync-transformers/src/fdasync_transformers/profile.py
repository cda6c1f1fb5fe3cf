"""How many KV blocks fit, by what memory is free and what a step needs besides; and how fast prefill is.

Called by `runner.py` at its start.
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
from fdasync.runner.input_batch import LaneTable
from fdasync_transformers.kv import KVPool

if TYPE_CHECKING:
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.step import StepModel

# of what is free; a CPU shares its memory with everyone else on the machine
_CPU_SHARE = 0.5
_GPU_SHARE = 0.92
# what a process takes of a GPU before it has made anything: context, kernels, libraries
_CONTEXT_NBYTES = 1 << 30

# enough to tell what a token costs, not so many that a start takes long
_SPEED_TOKENS = 256

_GREEDY = SamplerSpec(0, 0, 0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, (), False, False, 0)


def choose_num_blocks(
    step_model: StepModel,
    limits: RunnerLimits,
    max_context_tokens: int,
    block_tokens: int,
    nbytes: int | None,
    *,
    share: float = 1.0,
    graphs: int = 0,
) -> int:
    """Blocks that `nbytes` hold, no more than all lanes can use.

    Args:
        nbytes: None: of what memory is free, `share` at most; the rest is for others that start at the same time.
        graphs: of steps with prompts that will be captured.

    Raises ConfigError when not even one fits.
    """
    useful = limits.max_running * -(-max_context_tokens // block_tokens)
    block_nbytes = block_tokens * step_model.layout.token_nbytes
    if nbytes is None:
        nbytes = _free_nbytes(step_model, limits, max_context_tokens, block_tokens, share, graphs)
    if nbytes < block_nbytes:
        raise ConfigError(
            "kv_cache_nbytes", f"{nbytes} bytes hold no block of {block_nbytes}", hint="give more, or a smaller model"
        )
    return min(useful, nbytes // block_nbytes)


def _free_nbytes(
    step_model: StepModel,
    limits: RunnerLimits,
    max_context_tokens: int,
    block_tokens: int,
    share: float,
    graphs: int,
) -> int:
    device = step_model.model.device
    if device.type != "cuda":
        return int(_free_host_nbytes() * _CPU_SHARE * share)
    peak = _step_peak_nbytes(step_model, limits, max_context_tokens, block_tokens)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share < 1:
        # the others may not have taken theirs yet
        free = min(free, int(total * share) - torch.cuda.memory_reserved(device) - _CONTEXT_NBYTES)
    beside = _beside_nbytes(step_model, limits, max_context_tokens, block_tokens)
    if graphs:
        # what a step takes is theirs for good, and each keeps the logits of as many rows as may sample
        logits = limits.max_running * int(step_model.model.config.vocab_size) * step_model.layout.dtype.itemsize
        beside += peak + graphs * logits
    return int(free * _GPU_SHARE) - peak - beside


def _beside_nbytes(step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int) -> int:
    """What a runner keeps on the device beside model and KV, and what sampling takes at most."""
    vocab = int(step_model.model.config.vocab_size)
    columns = -(-max_context_tokens // block_tokens)
    tables = limits.max_running * columns * (1 + block_tokens) * 4
    # the logits of every captured size, at most those of twice the largest, in the model's dtype
    graphs = 2 * limits.max_running * vocab * step_model.layout.dtype.itemsize
    # float32 logits, and tables in float64 of values, ids and probabilities where a row asks for top-p
    sampling = limits.max_running * vocab * (4 + 4 * 8)
    return tables + graphs + sampling


def _step_peak_nbytes(step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int) -> int:
    """Device memory that the largest step takes beyond what is held, by running one."""
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
    # logits in float32 of as many rows as may sample
    step_model.run(batch, table, pool, np.arange(min(limits.max_running, sum(counts)))).float()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def prefill_tokens_per_s(
    step_model: StepModel, limits: RunnerLimits, max_context_tokens: int, block_tokens: int
) -> float:
    """Speed of one prefill of some hundred tokens; the better of two, as the first warms up. 0: not measured."""
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


def _fresh_prefills(step_model: StepModel, counts: list[int], block_tokens: int) -> tuple[Batch, LaneTable, KVPool]:
    """A step that prefills sequences of these lengths, and a pool of its own for it."""
    needed = [-(-count // block_tokens) for count in counts]
    pool = KVPool(step_model.layout, sum(needed), block_tokens, step_model.model.device)
    table = LaneTable(len(counts), max(counts), block_tokens, sum(needed))
    starts = []
    for key, count in enumerate(counts):
        blocks = tuple(range(sum(needed[:key]), sum(needed[: key + 1])))
        starts.append(SeqStart(key, bytes(4 * count), 0, blocks, (), (), _GREEDY))
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
