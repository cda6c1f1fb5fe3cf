"""Blocks from device to device, by a group of processes: each copies its part, and their checksums add up.

Knows no processes and no bytes. Made by `group.py`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, TypeVar

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.ipc.futures import fail, failed
from fdasync.ipc.peers.blocks import Exported, PeerBlocks, PoolExport, combined

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.ipc.peers.blocks import BlockPull
    from fdasync.ipc.remote import Fd

T = TypeVar("T")


class GroupPeerBlocks(PeerBlocks):
    """See the module.

    Args:
        ranks: the `PeerBlocks` of each rank, in order.
        named: an error of a rank, with the rank in its words.
    """

    def __init__(self, ranks: Sequence[PeerBlocks], named: Callable[[BaseException, int], Exception]) -> None:
        self._ranks = tuple(ranks)
        self._named = named
        self._pools: tuple[PoolExport, ...] = ()

    async def export(self) -> Exported:
        pools: list[PoolExport] = []
        fds: list[int] = []
        try:
            for rank, peers in enumerate(self._ranks):
                exported = await self._of(rank, peers.export())
                pools += exported.pools
                fds += exported.fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        if len(pools) != len(self._ranks):
            for fd in fds:
                os.close(fd)
            raise RunnerError(f"{len(self._ranks)} ranks show {len(pools)} pools")
        self._pools = tuple(pools)
        return Exported(self._pools, tuple(fds))

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None:
        try:
            for rank, peers in enumerate(self._ranks):
                await self._of(rank, peers.open(source, pools, fds))
        except BaseException as error:
            try:
                await self.close_source(source)
            except Exception as further:  # what failed first is what its caller has to know
                error.add_note(f"and closing it: {further}")
            raise

    async def close_source(self, source: bytes) -> None:
        """All ranks close it, whatever one of them says. Raises the first error, with notes of the others."""
        errors: list[Exception] = []
        for rank, peers in enumerate(self._ranks):
            try:
                await self._of(rank, peers.close_source(source))
            except Exception as error:
                errors.append(error)
        for further in errors[1:]:
            errors[0].add_note(str(further))
        if errors:
            raise errors[0]

    def pull(self, pull: BlockPull) -> asyncio.Future[list[int]]:
        return self._all([(pool.held_offset, pool.held) for pool in self._pools], lambda peers: peers.pull(pull))

    def sums(self, blocks: Sequence[int]) -> asyncio.Future[list[int]]:
        return self._all([(pool.offset, pool.part) for pool in self._pools], lambda peers: peers.sums(blocks))

    def _all(
        self, ranges: Sequence[tuple[int, int]], begin: Callable[[PeerBlocks], asyncio.Future[list[int]]]
    ) -> asyncio.Future[list[int]]:
        """Ends when all ranks have ended: until then one of them may copy, also where another could not begin. Fails
        with the first error."""
        if not ranges:
            raise InvariantBroken("copies before the pools were exported")
        calls = [_begun(begin, peers) for peers in self._ranks]
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        left = len(calls)

        def ended(_: object) -> None:
            nonlocal left
            left -= 1
            if left or done.done():
                return
            try:
                done.set_result(combined(ranges, [self._answer(rank, call) for rank, call in enumerate(calls)]))
            except Exception as error:
                fail(done, error)

        for call in calls:
            call.add_done_callback(ended)
        return done

    def _answer(self, rank: int, call: asyncio.Future[list[int]]) -> list[int]:
        error = RunnerError("it stopped") if call.cancelled() else call.exception()
        if error is not None:
            raise self._named(error, rank)
        return call.result()  # it is done

    async def _of(self, rank: int, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:
            raise self._named(error, rank) from error


def _begun(begin: Callable[[PeerBlocks], asyncio.Future[list[int]]], peers: PeerBlocks) -> asyncio.Future[list[int]]:
    """What `begin` returns; what it raises is the future's error."""
    try:
        return begin(peers)
    except Exception as error:
        return failed(error)
