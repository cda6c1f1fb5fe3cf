"""`Export`: a hold that keeps a block on the host while another instance reads it. Pure state.

`swap_planner.py` makes, holds and releases exports; `disagg/sender.py` asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block


class Export:
    """A block whose KV another instance shall read on the host: it goes there, and stays until `SwapPlanner.release`.

    Attributes:
        block: the block.
        held: the block has its place on the host, and the hold on it is taken.
        wanted: False once released.
    """

    __slots__ = ("block", "held", "wanted")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.held = False
        self.wanted = True

    @property
    def ready(self) -> bool:
        """The other instance may read the block now."""
        return self.held and self.block.on_host

    @property
    def gone(self) -> bool:
        """Its sequence gave the block up before there was room on the host, and the block was evicted."""
        return not self.held and self.block.id < 0 and self.block.host < 0
