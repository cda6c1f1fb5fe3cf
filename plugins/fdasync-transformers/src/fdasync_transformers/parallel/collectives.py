"""What the ranks of a group do together: sums, tensors and short messages of all, in the order of their ranks.

`Collectives` is the contract; `HostCollectives` is the one for CPUs, over shared memory, whose calls block the process
until all ranks have made them (`device_group.py` chooses that for GPUs). A sum is added up by every rank as one tree
of neighbours, (0 + 1) + (2 + 3), so that all get the same bits: two ranks whose parts are sums of two have the bits of
four ranks. All ranks make the same calls in the same order: each has a label, and another label fails both. Knows
tensors; knows no models. Made by `opened_runner.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync_kernels.collectives.peer_memory import PeerMemory

    from fdasync.ipc.exchange import Exchange

_NARROW = (torch.bfloat16, torch.float16)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors as a tree of neighbours, in float32 where they are narrower; of one tensor itself."""
    while len(parts) > 1:
        wide = [part.float() if part.dtype in _NARROW else part for part in parts]
        pairs = [left + right for left, right in zip(wide[::2], wide[1::2], strict=False)]
        parts = pairs + wide[len(pairs) * 2 :]
    return parts[0]


class Collectives(ABC):
    """The verbs of a group.

    Every verb raises RunnerError where a rank does not come in time, or comes for something else; no call is possible
    after that.

    Attributes:
        rank, ranks: of the group.
    """

    rank: int
    ranks: int
    _apart = False

    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of the ranks' tensors, of one shape and dtype; the same bits on every rank.

        Half precision is added up in float32 and rounded once. The result may be `tensor` itself, changed.
        """
        return tensor if self._apart else self._sum(tensor, label)

    def peers(self, rows: torch.Tensor) -> PeerMemory | None:
        """What the kernels of `finish.py` sum rows like these [T, H] by, on every rank alike; None: they do not, and
        `all_reduce` does."""
        del rows
        return None

    @property
    def is_apart(self) -> bool:
        """Whether sums are this rank's own part now."""
        return self._apart

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the context sums are this rank's own part: `all_reduce` returns its argument, and asks no other rank.

        For proofs of a rank's own code, and for parts that are added up before they are summed.
        """
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    @abstractmethod
    def _sum(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """See `all_reduce`."""

    @abstractmethod
    def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
        """The messages of all ranks: int32 [ranks, n] on the device of `message`, int32 [n] contiguous, some kilobytes.

        On a GPU it is queued on the current stream, as sums are.
        """

    @abstractmethod
    def gather(self, tensor: torch.Tensor, label: str) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape and dtype, in host memory of their own."""

    @abstractmethod
    def tell(self, message: bytes, label: str) -> list[bytes]:
        """The messages of all ranks. A message is short: at most some kilobytes."""


class HostCollectives(Collectives):
    """Over an `Exchange`, for tensors in host memory; larger ones go in several exchanges."""

    def __init__(self, exchange: Exchange) -> None:
        """`exchange`: the caller's."""
        self.rank, self.ranks = exchange.rank, exchange.ranks
        self._exchange = exchange

    def _sum(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise InvariantBroken(f"a sum of tensors on {tensor.device} over host memory")
        total = tensor.contiguous()
        flat = total.view(-1)
        count = self._exchange.slot_nbytes // tensor.element_size()
        for first in range(0, len(flat), count):
            piece = flat[first : first + count]
            piece.copy_(joined(self._gather(piece, label)))
        return total

    def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
        return torch.stack(self._gather(message, label))

    def gather(self, tensor: torch.Tensor, label: str) -> list[torch.Tensor]:
        flat = tensor.detach().cpu().contiguous().view(-1)
        found = [torch.empty_like(flat) for _ in range(self.ranks)]
        count = self._exchange.slot_nbytes // tensor.element_size()
        for first in range(0, len(flat), count):
            for held, part in zip(found, self._gather(flat[first : first + count], label), strict=True):
                held[first : first + count] = part
        return [held.view(tensor.shape) for held in found]

    def tell(self, message: bytes, label: str) -> list[bytes]:
        return [bytes(view) for view in self._exchange.gather(message, label)]

    def _gather(self, flat: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Gather tensors that fit into a slot."""
        data: Any = flat.detach().view(torch.uint8).numpy()
        parts = []
        for view in self._exchange.gather(memoryview(data), label):
            part = torch.empty(len(view), dtype=torch.uint8)
            if len(view) != len(data):
                raise InvariantBroken(f"{len(view)} bytes of {label} from one rank, {len(data)} from another")
            part.numpy()[:] = np.frombuffer(view, np.uint8)
            parts.append(part.view(flat.dtype))
        return parts
