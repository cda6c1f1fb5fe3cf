"""Blocks that processes copy out of each other's mapped memory, at equal and unequal widths, and past a kill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket

import msgspec
import numpy as np
import pytest

from fdasync.errors import RunnerError
from fdasync.ipc.child import die_with_parent
from fdasync.ipc.peers.blocks import DIFFERENT, BlockPull, PoolExport, combined
from fdasync.ipc.peers.memory import MemoryPool
from fdasync.ipc.peers.rows import PeerRows
from fdasync.ipc.peers.sums import added, block_sums
from fdasync.ipc.shared_memory import SharedRegion

BLOCK, BLOCKS, SOURCE = 768, 6, b"s" * 16


class Rank:
    """One process's pool: its part of each block, in rows."""

    def __init__(self, rank: int, ranks: int, shares: int = 4, blocks: int = BLOCKS, block: int = BLOCK) -> None:
        part = block // min(ranks, shares)
        offset = rank * min(ranks, shares) // ranks * part
        writes = ranks <= shares or rank % (ranks // shares) == 0
        self.own = PoolExport("memory", blocks * part, blocks, 0, part, block, offset, part, offset, part, writes)
        self.region = SharedRegion.create("pool", blocks * part)
        self.rows = np.frombuffer(self.region.map, np.uint8).reshape(blocks, part)
        self.pool = MemoryPool(self.region)
        self.pulled: list[BlockPull] = []
        self.peers = PeerRows(self.pool, self.own, self.pulled.append)

    async def aclose(self) -> None:
        await self.peers.aclose()
        self.rows = np.empty((0, 0), np.uint8)
        self.region.close()


def content(seed: int, blocks: int = BLOCKS, block: int = BLOCK) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, block), np.uint8)


async def exported(ranks: list[Rank]) -> tuple[list[PoolExport], list[int]]:
    shown = [await rank.peers.export() for rank in ranks]
    return [one.pools[0] for one in shown], [one.fds[0] for one in shown]


def test_sums_add_up_however_blocks_are_cut():
    rows = content(1)
    whole = block_sums(rows).tolist()
    for cuts in ((0, BLOCK), (0, 8, BLOCK), (0, 256, 264, 512, BLOCK)):
        runs = [block_sums(rows[:, a:b], a).tolist() for a, b in itertools.pairwise(cuts)]
        assert [added(list(told)) for told in zip(*runs, strict=True)] == whole
    assert len(set(whole)) == BLOCKS


def test_every_bit_and_every_swap_of_words_changes_the_sum():
    row = content(2, 1, 64)
    before = block_sums(row)[0]
    for bit in range(64 * 8):
        row[0, bit // 8] ^= 1 << bit % 8
        assert block_sums(row)[0] != before, bit
        row[0, bit // 8] ^= 1 << bit % 8
    words = row.view(np.uint64)
    words[0, [0, 5]] = words[0, [5, 0]]
    assert block_sums(row)[0] != before


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 4), (4, 2), (1, 4), (4, 1), (8, 2), (2, 8)])
def test_a_block_arrives_at_any_width(theirs, ours):
    async def play() -> None:
        senders, receivers = [Rank(r, theirs) for r in range(theirs)], [Rank(r, ours) for r in range(ours)]
        sent = content(3)
        for rank in senders:
            # nobody reads what is written by another rank, which may be behind
            mine = sent[:, rank.own.offset : rank.own.offset + rank.own.part]
            rank.rows[:] = mine if rank.own.writes else ~mine
        pools, fds = await exported(senders)
        writers = [rank for rank in senders if rank.own.writes]
        told = combined([(r.own.offset, r.own.part) for r in writers], [await r.peers.sums([4, 0, 5]) for r in writers])
        assert told == block_sums(sent[[4, 0, 5]]).tolist()
        pull = BlockPull(SOURCE, (4, 0, 5), (1, 2, 0))
        found = []
        for rank in receivers:
            await rank.peers.open(SOURCE, pools, fds)
            found.append(await rank.peers.pull(pull))
            wanted = np.zeros_like(sent)
            wanted[[1, 2, 0]] = sent[[4, 0, 5]]
            assert (rank.rows == wanted[:, rank.own.offset : rank.own.offset + rank.own.part]).all()
            assert rank.pulled == [pull]
        ranges = [(rank.own.held_offset, rank.own.held) for rank in receivers]
        assert combined(ranges, found) == told
        if ours > 4:
            found[1][0] ^= 1
            assert combined(ranges, found)[0] == DIFFERENT
        for fd in fds:
            os.close(fd)
        for rank in senders + receivers:
            await rank.aclose()

    asyncio.run(play())


def test_what_cannot_be_opened_or_copied_is_refused():
    async def play() -> None:
        sender, receiver, half = Rank(0, 1), Rank(0, 1), Rank(1, 2)
        pools, fds = await exported([sender])
        (half_pool,), (half_fd,) = await exported([half])
        wrong = [
            ([half_pool], [half_fd]),
            ([msgspec.structs.replace(pools[0], kind="cuda")], fds),
            ([msgspec.structs.replace(pools[0], num_blocks=BLOCKS + 1)], fds),
            ([msgspec.structs.replace(pools[0], num_blocks=2 * BLOCKS, nbytes=2 * BLOCKS * BLOCK)], fds),
            ([msgspec.structs.replace(pools[0], block=2 * BLOCK)], fds),
            ([msgspec.structs.replace(pools[0], first=-8)], fds),
        ]
        for given, descriptors in wrong:
            with pytest.raises(RunnerError):
                await receiver.peers.open(SOURCE, given, descriptors)
        reader, writer = os.pipe()
        with pytest.raises(RunnerError):
            await receiver.peers.open(SOURCE, pools, [reader])
        await receiver.peers.open(SOURCE, pools, fds)
        pulls = [((BLOCKS,), (0,)), ((0,), (-1,)), ((0, 1), (2, 2)), ((0, 1), (2,))]
        for theirs, ours in pulls:
            with pytest.raises(RunnerError):
                await receiver.peers.pull(BlockPull(SOURCE, theirs, ours))
        with pytest.raises(RunnerError):
            await receiver.peers.pull(BlockPull(b"other", (0,), (0,)))
        with pytest.raises(RunnerError):
            await receiver.peers.sums([BLOCKS])
        await receiver.peers.close_source(SOURCE)
        await receiver.peers.close_source(SOURCE)
        with pytest.raises(RunnerError):
            await receiver.peers.pull(BlockPull(SOURCE, (0,), (0,)))
        for fd in [*fds, half_fd, reader, writer]:
            os.close(fd)
        for rank in (sender, receiver, half):
            await rank.aclose()

    asyncio.run(play())


def test_a_sender_that_is_killed_in_mid_copy_is_still_read():
    """Its memory lives as long as the mapping: the copy ends whole, and its checksum says so."""
    block, blocks = 8 << 20, 2
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        here.close()
        die_with_parent()

        async def send() -> None:
            sender = Rank(0, 1, blocks=blocks, block=block)
            sender.rows[:] = content(5, blocks, block)
            _, fds = await exported([sender])
            socket.send_fds(there, [b"x"], fds)
            signal.pause()

        try:
            asyncio.run(send())
        finally:
            os._exit(1)
    there.close()

    async def play() -> None:
        receiver = Rank(0, 1, blocks=blocks, block=block)
        await receiver.peers.open(SOURCE, [receiver.own], fds)
        os.close(fds[0])
        pulled = receiver.peers.pull(BlockPull(SOURCE, (0, 1), (1, 0)))
        while not receiver.rows[1, : 1 << 20].any():  # noqa: ASYNC110 - memory that a copy fills
            await asyncio.sleep(0)
        assert not receiver.rows[0].any()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the copy may not go on meanwhile
        assert not receiver.rows[0].any(), "the copy ended before the kill"
        sent = content(5, blocks, block)
        assert await pulled == block_sums(sent).tolist()
        assert (receiver.rows == sent[[1, 0]]).all()
        await receiver.aclose()

    try:
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
        asyncio.run(play())
    finally:
        here.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
