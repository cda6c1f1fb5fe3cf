"""An opened runner: puts the parts together, loading, mends, probe, self-check, sizes.

Knows no blocks and no steps in flight. Made by `runner.py`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from fdasync.errors import CheckpointError
from fdasync.runner.chosen import LentRows
from fdasync_transformers.capture.aux_producer import AuxSource
from fdasync_transformers.execution.shown_pool import ShownPool
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.device_group import join
from fdasync_transformers.sampling.grammar_process import GrammarProcess
from fdasync_transformers.sampling.grammars import Grammars
from fdasync_transformers.start.aux_producers import make_aux, try_aux
from fdasync_transformers.start.capacity import capacity_of
from fdasync_transformers.start.open_model import open_model
from fdasync_transformers.start.processors import make_processors
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.groups.joined import JoinedGroups
from fdasync_transformers.weights.update import LiveWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync.ipc.exchange import Exchange
    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.execution.model_memory import ModelMemory
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.start.runner_config import TransformersConfig


class OpenedRunner:
    """What a runner has from the moment at which its model is open. Made by loading it; blocks meanwhile.

    Args:
        config, limits: of the runner; they were checked.
        exchange: of the group; None: this process computes alone.
        memory: where weights and blocks will lie; the caller closes it, also where this fails. Its device is current.

    Attributes:
        config, limits, memory: as given.
        device: of the model.
        model: ready to be served.
        capacity: what `Runner.open` returns.
        weights: in use.
        groups: of trainers, by which new weights come.
        aux: the producers of the steps' rows, attached when blocks are bound.
        grammars: of the model; None: it has none.
        checks: of callers' grammars; None: there are none, or another rank has them.
        lent: memory for what indexers choose, by sequence.
        shown: holds the blocks, where other instances copy from them; None: none does.
        collectives: of the group that computes each step together; None: this process alone.

    Raises CheckpointError, UnsupportedModel and ConfigError.
    """

    def __init__(
        self, config: TransformersConfig, limits: RunnerLimits, exchange: Exchange | None, memory: ModelMemory
    ) -> None:
        self.config, self.limits, self.memory, device = config, limits, memory, memory.device
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) - 1
            torch.set_num_threads(max(1, cores // limits.tensor_parallel))
        drawn = config.weights == "random"
        checkpoint = loading.read_checkpoint(limits.model, with_tensors=not drawn)
        facts = identity.config_facts(checkpoint.config)
        notes = []
        self.collectives: Collectives | None = None if exchange is None else HostCollectives(exchange)
        if exchange is not None and device.type == "cuda":
            dtype = loading.choose_dtype(checkpoint, config.dtype)
            row = torch.empty(int(checkpoint.config.hidden_size), dtype=dtype, device="meta")
            way, may_share = config.collectives, config.ranks_share_gpu
            self.collectives, note = join(exchange, device, way, row, may_share=may_share)
            notes.append(note)
        self.model = open_model(checkpoint, config, limits, memory, self.collectives)
        model = self.model.step_model.model
        self.device = model.device
        notes += self.model.notes
        self.processors = make_processors(config.processors, int(model.config.vocab_size))
        source = AuxSource(model, self.model.captured, self.model.routers, limits.routing_debug)
        self.aux = make_aux(config.aux, source, fixed=limits.numerics == "fixed")
        if config.aux:
            try_aux(self.aux, self.model, limits.max_step_tokens)
        self.grammars, self.checks = _grammars_of(checkpoint, model, limits, notes)
        self.weights = LiveWeights(self.model.names, facts, self.collectives, limits.model if drawn else "")
        self.groups = JoinedGroups(self.device, self.weights)
        self.lent = LentRows()
        self.shown = ShownPool(self.device) if limits.shows_blocks else None
        has_grammars = self.grammars is not None
        self.capacity = capacity_of(
            self.model, checkpoint, config, limits, self.collectives, memory, aux_specs=self.aux.specs,
            grammars=has_grammars, notes=notes,
        )  # fmt: skip


def _grammars_of(
    checkpoint: loading.Checkpoint, model: PreTrainedModel, limits: RunnerLimits, notes: list[str]
) -> tuple[Grammars | None, GrammarProcess | None]:
    """None, and a note, where the checkpoint has no tokenizer to read grammars by."""
    tokenizer, eos_ids = checkpoint.folder / "tokenizer.json", loading.eos_ids(checkpoint)
    if not tokenizer.exists() or not eos_ids:
        notes.append("no grammars: there is no tokenizer.json, or no EOS")
        return None, None
    vocab_size = int(model.config.vocab_size)
    try:
        grammars = Grammars(tokenizer, vocab_size, eos_ids)
    except CheckpointError as error:
        notes.append(f"no grammars: {error.problem}")
        return None, None
    # rank 0 samples
    return grammars, None if limits.rank else GrammarProcess(tokenizer, vocab_size, eos_ids)


def current(device: torch.device) -> AbstractContextManager[object]:
    """While it is entered, this GPU is the current device; does nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
