"""KV blocks on the devices of one instance that other instances of the machine copy: what a runner offers for it.

Blocks are *canonical*: their bytes do not depend on the number of processes that compute each step (docs/design.md,
section 4). Each process has one run of every block in its pool. It exports the pool (`PoolExport` and a descriptor),
and opens the pools of another instance's processes once. Then it copies blocks from these into its own pool, each in as
many runs as there are processes to take it from. So the two instances may have different numbers of processes.

**Whole and checked.** A copy ends with a checksum that is computed over the copied bytes where they are. The checksums
of all processes add up to the block's (`ipc/peers/sums.py`), which the sender tells in a message.

Knows no requests, leases and messages. `Runner.peer_blocks` returns one; `fdasync_fleet/transfer/device_blocks.py`
calls it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fdasync.errors import RunnerError
from fdasync.ipc.peers.sums import WORD_NBYTES, added
from fdasync.ipc.remote import Fd, remote

#: stands for the checksum of a block that two processes have with different bytes
DIFFERENT = -1
_MAX = 1 << 48


class PoolExport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One process's pool. All numbers but `num_blocks` are bytes.

    Attributes:
        kind: `PeerPool.kind`.
        nbytes: of the memory behind the descriptor.
        num_blocks: rows; all processes of an instance have as many.
        first: place of row 0 in the memory.
        stride: from one row to the next.
        block: size of a whole block.
        offset, part: the run of each block that a row is, and which others read.
        held_offset, held: the run of each block that the process fills when it copies blocks of others.
        writes: others read this part here; of processes with the same part, one has it.
    """

    kind: str
    nbytes: int
    num_blocks: int
    first: int
    stride: int
    block: int
    offset: int
    part: int
    held_offset: int
    held: int
    writes: bool

    def check(self) -> None:
        """Raise RunnerError unless its numbers fit each other: they may come from a peer."""
        numbers = (self.nbytes, self.num_blocks, self.first, self.stride, self.block, self.offset, self.part)
        held = (self.held_offset, self.held)
        whole = all(0 <= number < _MAX for number in (*numbers, *held))
        whole = whole and not any(number % WORD_NBYTES for number in (self.block, self.offset, self.part, *held))
        whole = whole and self.num_blocks > 0 and self.part > 0 and self.stride >= self.part
        whole = whole and self.offset + self.part <= self.block and self.held_offset + self.held <= self.block
        if not whole or self.first + (self.num_blocks - 1) * self.stride + self.part > self.nbytes:
            raise RunnerError(f"a pool that cannot be: {self}")

    def place(self, byte: int) -> int:
        """Where byte `byte` of block 0 lies in the memory."""
        return self.first - self.offset + byte


class Exported(NamedTuple):
    """What an instance shows to others.

    Attributes:
        pools: of its processes, by rank.
        fds: one for each, the caller's to close.
    """

    pools: tuple[PoolExport, ...]
    fds: tuple[int, ...]


class BlockPull(msgspec.Struct, frozen=True, array_like=True, tag="pull"):
    """Copy blocks of another instance.

    Attributes:
        source: the name that it was opened by.
        theirs: block numbers there.
        ours: block numbers here, in the same order; no two are equal.
        slots, generations: where rows of these blocks are, as in `SwapIn`; empty without aux data.
    """

    source: bytes
    theirs: tuple[int, ...]
    ours: tuple[int, ...]
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


class PeerBlocks(ABC):
    """See the module. Used from one loop."""

    @abstractmethod
    async def export(self) -> Exported:
        """Descriptors of the pools. Raises RunnerError."""

    @abstractmethod
    @remote(beside=True)
    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None:
        """Map another instance's pools, under a name that is not open. The descriptors stay the caller's, open until
        this has returned.

        Raises RunnerError where a device does not reach them, or they are no pools of the same blocks; then nothing is
        open under the name.
        """

    @abstractmethod
    @remote(beside=True)
    async def close_source(self, source: bytes) -> None:
        """Unmap an instance's pools once no copy out of them is in flight; idempotent."""

    @abstractmethod
    @remote(beside=True)
    def pull(self, pull: BlockPull) -> asyncio.Future[list[int]]:
        """Copy blocks; the future has the checksum of each block as it is here now, or `DIFFERENT`.

        The caller gives the blocks to no step and no other copy before the future is done, and cancelling it stops the
        waiting only. The future fails with RunnerError: for an unknown source or a block that there is not, before
        anything is copied, and after an error of the device.
        """

    @abstractmethod
    @remote(beside=True)
    def sums(self, blocks: Sequence[int]) -> asyncio.Future[list[int]]:
        """The checksum of each block of this instance; as `pull`. The caller gives the blocks no writer meanwhile."""


def combined(ranges: Sequence[tuple[int, int]], sums: Sequence[Sequence[int]]) -> list[int]:
    """Checksums of whole blocks from those of processes; each process has one run (offset, bytes) of every block.

    Processes with the same run must have the same checksum of it; else the block's is `DIFFERENT`.
    """
    blocks: list[int] = []
    for told in zip(*sums, strict=True):
        by_range: dict[tuple[int, int], int] = {}
        same = DIFFERENT not in told
        for where, value in zip(ranges, told, strict=True):
            same = same and by_range.setdefault(where, value) == value
        blocks.append(added(list(by_range.values())) if same else DIFFERENT)
    return blocks
