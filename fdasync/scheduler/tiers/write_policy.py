"""Decides which blocks are kept beyond the device: on the host and in the store. Pure.

Sealed blocks are written to the store as they seal (write-through). Blocks of preempted sequences go to the host at
once (write-back). This module plans no copy and no write: `swap_planner.py` and `store_planner.py` do. Called by
`results.py` and `queues.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.store_planner import StorePlanner
    from fdasync.scheduler.tiers.swap_planner import SwapPlanner


class WritePolicy:
    """See the module.

    Attributes:
        through: sealed blocks may have to be written.
    """

    def __init__(self, config: SchedulerConfig, swap_planner: SwapPlanner, store_planner: StorePlanner) -> None:
        self.through = config.store and config.write_through != "off"
        self._config = config
        self._swap_planner = swap_planner
        self._store_planner = store_planner

    def write_through(self, seq: Sequence, number: int) -> None:
        """A block was sealed: have it written to the store, if the configuration says so."""
        block = seq.blocks[number]
        prompt = (number + 1) * self._config.block_tokens <= seq.prompt_len
        if block.key is not None and (prompt or self._config.write_through == "all"):
            self._store_planner.chains.want(block, number, seq.keys[number - 1] if number else b"")

    def write_back(self, seq: Sequence) -> None:
        """A preempted sequence gives its blocks up: sealed blocks go to the host, and from there to the store."""
        if not self._config.write_back:
            return
        for number, block in enumerate(seq.blocks):
            if not block.sealed or block.key is None:
                continue
            if block.snapshot is not None:
                self._swap_planner.keep_snapshot(block.snapshot)
            if self._config.store and not block.stored and not block.wanted:
                self._store_planner.chains.want(block, number, seq.keys[number - 1] if number else b"")
            else:
                self._swap_planner.keep(block)
