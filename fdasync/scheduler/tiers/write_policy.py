"""Which blocks go to the host and the store although nobody asks for them. Pure.

Sealed blocks are written to the store as they are sealed (write-through), those of preempted sequences go to the host
at once (write-back). Called by `core.py` and `queues.py`; `swap_planner.py` and `store_planner.py` do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.store_planner import Storer
    from fdasync.scheduler.tiers.swap_planner import Copier


class WritePolicy:
    """See the module.

    Attributes:
        through: sealed blocks may have to be written.
    """

    def __init__(self, config: SchedulerConfig, copier: Copier, storer: Storer) -> None:
        self.through = config.store and config.write_through != "off"
        self._config = config
        self._copier = copier
        self._storer = storer

    def write_through(self, seq: Sequence, number: int) -> None:
        """A block was sealed: shall the store have it?"""
        block = seq.blocks[number]
        prompt = (number + 1) * self._config.block_tokens <= seq.prompt_len
        if block.key is not None and (prompt or self._config.write_through == "all"):
            self._storer.chains.want(block, seq.keys[number - 1] if number else b"")

    def write_back(self, seq: Sequence) -> None:
        """A preempted sequence gives its blocks up: what is sealed goes to the host, and from there to the store."""
        if not self._config.write_back:
            return
        for number, block in enumerate(seq.blocks):
            if not block.sealed or block.key is None:
                continue
            if self._config.store and not block.stored and not block.wanted:
                self._storer.chains.want(block, seq.keys[number - 1] if number else b"")
            else:
                self._copier.keep(block)
