"""The memory and the settings of a runner's executor, once the model is loaded.

Knows no checkpoint. Made by `start/bound_runner.py`; read by the executor and the parts of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fdasync.runner.chosen import LentRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena, HostPart
    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.capture.aux_data import AuxData
    from fdasync_transformers.execution.parts.lane_matchers import LaneMatchers
    from fdasync_transformers.model.kv import KVPool
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.sampling.processors import LogitsProcessor

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Bound:
    """The memory and settings of an executor.

    Attributes:
        pool: the KV.
        table: tokens, blocks and slots of each lane.
        arena: of the rows; None: there are no aux data.
        host: the host tier, or None.
        snapshots: places of snapshots on the host, or None.
        aux: the producers of the rows.
        matchers: of the grammars of its sequences.
        vocab_size: logits past it belong to no token.
        logits_dtype: torch's name of the dtype that sampling works in.
        part: of host blocks that the pool's rows are.
        snapshot_part: likewise of snapshots; of a group each rank has them whole, and rank 0 writes.
        collectives: of the group that computes each step together; None: this process alone.
        speculation: most drafts of a sequence that a step verifies; the table has room for them.
        pipeline_depth: most steps in flight.
        lent: memory for what indexers choose, by sequence.
        processors: of logits, by name.
    """

    pool: KVPool
    table: InputBatch
    arena: AuxArena | None
    host: HostArena | None
    aux: AuxData
    matchers: LaneMatchers
    vocab_size: int
    logits_dtype: str
    snapshots: HostArena | None = None
    part: HostPart | None = None
    snapshot_part: HostPart | None = None
    collectives: Collectives | None = None
    speculation: int = 0
    pipeline_depth: int = 1
    lent: LentRows = field(default_factory=LentRows)
    processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)

    def trim(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the vocabulary alone, a view; rounded where sampling works in a narrower dtype than float32.

        Sampling reads narrow logits as float32: a float32 copy of them would say the same.
        """
        logits = logits[:, : self.vocab_size]
        if self.logits_dtype == "float32" and logits.dtype in _NARROW:
            return logits
        return logits.to(getattr(torch, self.logits_dtype))
