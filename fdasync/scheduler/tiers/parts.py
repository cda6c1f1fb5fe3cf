"""What every scheduler stands on, made from its configuration: the core, the planner and attachments share it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.prefix import PrefixIndex
from fdasync.cache.snapshots import SnapshotPool
from fdasync.scheduler.state.pausing import Pausing
from fdasync.scheduler.state.queues import SequenceQueues
from fdasync.scheduler.state.weights import Weights
from fdasync.scheduler.tiers.store_planner import StorePlanner
from fdasync.scheduler.tiers.swap_planner import SwapPlanner
from fdasync.scheduler.tiers.write_policy import WritePolicy

if TYPE_CHECKING:
    from fdasync.events.actions import RowSpan
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence


class Parts:
    """See the module.

    Attributes:
        config: the scheduler's configuration.
        index: blocks by identity, in all tiers.
        weights: the weights in use.
        pausing: whether steps are planned, and for which sequences.
        sequences: the live ones by key.
        queues: where every sequence stands.
        spans: rows that are to be copied in this turn.
        swap_planner, store_planner, writes: decide what happens below the device.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        slots = SlotPool(config.num_blocks + config.num_host_blocks) if config.capture else None
        snapshots = SnapshotPool(config.num_snapshots, config.num_host_snapshots) if config.recurrent else None
        pool = BlockPool(config.num_blocks, slots, config.num_host_blocks, snapshots)
        self.index = PrefixIndex(pool, enabled=config.prefix_cache, kv_events=config.kv_events)
        self.weights = Weights(config.namespace, config.weight_version, config.weights_id)
        self.pausing = Pausing()
        self.sequences: dict[int, Sequence] = {}
        self.spans: list[RowSpan] = []
        self.swap_planner = SwapPlanner(config, self.index)
        self.store_planner = StorePlanner(config, self.index, self.swap_planner.keep, self.swap_planner.keep_snapshot)
        self.writes = WritePolicy(config, self.swap_planner, self.store_planner)
        self.queues = SequenceQueues(
            config.block_tokens,
            self.index,
            self.spans,
            self.writes.write_back,
            asks_store=self.store_planner.enabled,
        )
