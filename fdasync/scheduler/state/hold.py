"""What keeps a block on the host for another instance. Pure state: `swap_planner.py` makes, holds and releases it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block


class Export:
    """A block whose KV another instance shall read on the host: it goes there, and stays until `Copier.release`.

    Attributes:
        held: it has its place on the host.
        wanted: False once released.
    """

    __slots__ = ("block", "held", "wanted")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.held = False
        self.wanted = True

    @property
    def ready(self) -> bool:
        return self.held and self.block.on_host

    @property
    def gone(self) -> bool:
        """Who had it gave it up before it found a place on the host, and it was evicted."""
        return not self.held and self.block.id < 0 and self.block.host < 0
