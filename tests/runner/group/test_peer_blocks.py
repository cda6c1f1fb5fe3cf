"""Blocks of a group of processes: one that cannot begin a copy, while others have begun."""

from __future__ import annotations

import asyncio
import os

import pytest

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.ipc.peers.blocks import BlockPull
from fdasync.ipc.peers.sums import block_sums
from fdasync.runner.group.errors import of_rank
from fdasync.runner.group.peer_blocks import GroupPeerBlocks
from tests.ipc.test_peer_rows import Rank, content

SOURCE, BLOCK = b"s" * 16, 8 << 20


async def group_of(ranks: list[Rank]) -> GroupPeerBlocks:
    """Has exported its pools, and opened them as those of another instance."""
    group = GroupPeerBlocks([rank.peers for rank in ranks], lambda error, rank: of_rank(error, rank, len(ranks)))
    shown = await group.export()
    await group.open(SOURCE, shown.pools, shown.fds)
    for fd in shown.fds:
        os.close(fd)
    return group


@pytest.mark.parametrize("what", ["pull", "sums"])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_begin_does_not_hide_those_that_have(what, broken):
    async def play() -> None:
        ranks = [Rank(rank, 2, blocks=3, block=BLOCK) for rank in range(2)]
        group = await group_of(ranks)
        await ranks[broken].pool.aclose()
        other = ranks[1 - broken]
        other.rows[:] = content(4, 3, BLOCK)[:, : other.own.part]
        call = group.pull(BlockPull(SOURCE, (0, 1), (1, 2))) if what == "pull" else group.sums([0, 1])
        assert other.pool._work
        await asyncio.wait([call])
        assert not other.pool._work
        with pytest.raises(InvariantBroken, match=f"rank {broken} of 2: copies after the close"):
            await call
        if what == "pull":
            assert (other.rows[1] == other.rows[0]).all()
            assert len(other.pulled) == 1
        for rank in ranks:
            await rank.aclose()

    asyncio.run(play())


class Closing:
    """Stands for a rank's blocks; rank 3 opens nothing, and some cannot close."""

    def __init__(self, rank: int, stuck: bool) -> None:
        self.rank, self.stuck, self.is_open = rank, stuck, False

    async def open(self, *_: object) -> None:
        if self.rank == 3:
            raise RunnerError("no memory")
        self.is_open = True

    async def close_source(self, _: bytes) -> None:
        if self.stuck:
            raise RunnerError("cannot close")
        self.is_open = False


def test_all_ranks_close_a_source_that_one_could_not_open():
    async def play() -> None:
        ranks = [Closing(rank, rank in (0, 2)) for rank in range(4)]
        group = GroupPeerBlocks(ranks, lambda error, rank: of_rank(error, rank, len(ranks)))
        with pytest.raises(RunnerError, match="rank 3 of 4: no memory") as caught:
            await group.open(SOURCE, (), ())
        assert any("rank 0 of 4: cannot close" in note for note in caught.value.__notes__)
        assert [rank.is_open for rank in ranks] == [True, False, True, False]
        with pytest.raises(RunnerError, match="rank 0 of 4: cannot close") as caught:
            await group.close_source(SOURCE)
        assert any("rank 2 of 4: cannot close" in note for note in caught.value.__notes__)

    asyncio.run(play())


def test_both_halves_make_the_sum():
    async def play() -> None:
        ranks = [Rank(rank, 2) for rank in range(2)]
        group = await group_of(ranks)
        sent = content(5)
        for rank in ranks:
            rank.rows[:] = sent[:, rank.own.offset : rank.own.offset + rank.own.part]
        assert await group.sums([2, 0]) == block_sums(sent[[2, 0]]).tolist()
        for rank in ranks:
            await rank.aclose()

    asyncio.run(play())


def test_before_the_pools_are_exported_no_rank_begins():
    async def play() -> None:
        rank = Rank(0, 1)
        with pytest.raises(InvariantBroken, match="before the pools"):
            GroupPeerBlocks([rank.peers], lambda error, rank: of_rank(error, rank, 1)).sums([0])
        assert not rank.pool._work
        await rank.aclose()

    asyncio.run(play())
