"""The modules of a model whose outputs are summed over the ranks, and the sums.

Knows modules; knows no plan. Made by `shard.py`; the room `fused` asks it, to put a sum where several outputs meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from fdasync_kernels.collectives.peer_memory import PeerMemory

    from fdasync_transformers.parallel.collectives import Collectives


class Sums:
    """See the module.

    Args:
        names: of the summed modules, by module.

    Attributes:
        collectives: of the group.
    """

    def __init__(self, collectives: Collectives, names: Mapping[torch.nn.Module, str]) -> None:
        self.collectives = collectives
        self._names = dict(names)

    def within(self, module: torch.nn.Module) -> bool:
        """Whether the output of the module, or of a module in it, is summed."""
        return any(each in self._names for each in module.modules())

    def peers(self, rows: torch.Tensor, module: torch.nn.Module) -> PeerMemory | None:
        """See `Collectives.peers`: for the output of this module, whose forward is called within `collectives.apart`
        then. None, too, where more than the sum is made of the output, such as a bias behind it."""
        plain = module in self._names and getattr(module, "bias", None) is None
        return self.collectives.peers(rows) if plain else None

    def total(self, partial: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
        """The sum of all ranks' parts of this module's output."""
        return self.collectives.all_reduce(partial, self._names[module])
