"""`Export`: a hold that keeps a block in its place while another instance reads it. Pure state.

`swap_planner.py` makes, holds and releases exports; `disagg/sender.py` asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block


@dataclass(slots=True, eq=False)
class Export:
    """A block whose KV another instance shall read. On the device it is pinned at once. Else it goes to the host, and
    stays there. It is held until `SwapPlanner.release`.

    Attributes:
        block: the block.
        on_device: the other instance reads the device.
        held: the block has its place, and the hold on it is taken.
        wanted: False once released.
    """

    block: Block
    on_device: bool = field(default=False, kw_only=True)
    held: bool = False
    wanted: bool = True

    @property
    def ready(self) -> bool:
        """The other instance may read the block now."""
        return self.held and (self.on_device or self.block.on_host)

    @property
    def gone(self) -> bool:
        """Its sequence gave the block up before there was room on the host, and the block was evicted."""
        return not self.held and self.block.id < 0 and self.block.host < 0
