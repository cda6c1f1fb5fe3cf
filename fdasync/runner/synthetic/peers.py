"""The synthetic runner's KV in memory that other processes map: its "device", where instances copy from each other.

Every rank holds whole blocks, and shows its own shares alone: a share that is taken from another rank, or from none,
shows in tokens. With stamps a token's KV and its stamp stand side by side, so that a block is one run of bytes. Knows
no steps. Made by `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from fdasync.ipc.peers.blocks import BlockPull, PoolExport
from fdasync.ipc.peers.memory import MemoryPool
from fdasync.ipc.peers.rows import PeerRows
from fdasync.ipc.shared_memory import SharedRegion
from fdasync.runner.synthetic.oracle import U64

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.runner.shares import Part

_STAMP_NBYTES = 4


class Owner(Protocol):
    """What a runner does about blocks that come from other instances."""

    def check_pull(self, pull: BlockPull) -> None:
        """Raise InvariantBroken for a pull that may not begin now."""

    def pulled(self, pull: BlockPull) -> None:
        """Its blocks are here."""


class SyntheticPeers:
    """See the module.

    Args:
        words: of the KV, one for each token.
        block_tokens: tokens of a block.
        shares, part: how blocks are cut, and what this rank shows.
        stamped: whether tokens have stamps.

    Attributes:
        words: uint64 [words], the KV.
        stamps: uint32 [words], or [0].
        rows: the blocks, for other instances.
    """

    def __init__(
        self, words: int, block_tokens: int, shares: int, part: Part, owner: Owner, *, stamped: bool = False
    ) -> None:
        token = _token_nbytes(stamped)
        block = block_tokens * token
        share = block // shares
        offset, nbytes = part.first * share, part.num_shares * share
        self._region = SharedRegion.create("synthetic-kv", words * token)
        memory = self._region.map
        self.words: NDArray[U64] = np.ndarray((words,), U64, memory, 0, (token,))
        self.stamps: NDArray[np.uint32] = np.ndarray(
            (words if stamped else 0,), np.uint32, memory, token - _STAMP_NBYTES, (token,)
        )
        self._pool = MemoryPool(self._region)
        own = PoolExport(
            kind=self._pool.kind,
            nbytes=words * token,
            num_blocks=words // block_tokens,
            first=offset,
            stride=block,
            block=block,
            offset=offset,
            part=nbytes,
            held_offset=0,
            held=block,
            writes=part.writes,
        )
        self.rows = PeerRows(self._pool, own, owner.pulled, owner.check_pull)

    @staticmethod
    def takes(block_tokens: int, shares: int, *, stamped: bool) -> bool:
        """Whether shares of such blocks are of whole words, as checksums have them."""
        return block_tokens * _token_nbytes(stamped) % (shares * U64().nbytes) == 0

    async def aclose(self) -> None:
        """Free the memory once no copy is in flight. Raises DeadlineExceeded."""
        await self.rows.aclose()
        self.words, self.stamps = np.zeros(0, U64), np.zeros(0, np.uint32)
        self._region.close()


def _token_nbytes(stamped: bool) -> int:
    return U64().nbytes + (_STAMP_NBYTES if stamped else 0)
