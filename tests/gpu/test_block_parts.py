"""Copies of a part of each host block: where it goes, who writes it, and that nothing beside it is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fdasync.cache.host_arena import HostArena, HostPart
from fdasync.errors import InvariantBroken
from fdasync.gpu.block_copies import BlockCopies
from fdasync.gpu.block_rows import BlockRows
from fdasync.gpu.cudart import Driver
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.fake import FakePort
from fdasync.gpu.streams import Streams
from tests.gpu.test_block_copies import Library, event_pool

BLOCKS, HOST_BLOCKS, NBYTES, RANKS = 6, 5, 96, 4
PART = NBYTES // RANKS


@pytest.fixture(params=["rows", "batch", "single"])
def way(request, device) -> str:
    if device.type == "cuda" and request.param == "rows":
        pytest.skip("the CPU's")
    return request.param


def driver_of(way: str, device: torch.device) -> Driver | None:
    if device.type == "cpu":
        return None if way == "rows" else Driver(Library(1 << 46, "" if way == "single" else "cuMemcpyBatchAsync_v2"))
    driver = Driver()
    driver.has_batch = driver.has_batch and way == "batch"
    return driver


async def test_parts_of_all_ranks_make_a_block(device, way):
    rng = np.random.default_rng(2)
    whole = rng.integers(0, 256, (BLOCKS, NBYTES), np.uint8)
    host = HostArena.create(HOST_BLOCKS, NBYTES)
    host.kv[:] = 7
    expected = host.kv.copy()
    # the last rank holds what the one before it holds, and writes nothing
    for first, writes in ((0, True), (1, True), (2, True), (2, False)):
        mine = whole[:, first * PART : (first + 1) * PART]
        sent = mine if writes else 255 - mine
        blocks = torch.from_numpy(sent.copy()).to(device).view(torch.bfloat16)
        port = AdaptivePort() if device.type == "cuda" else FakePort()
        part = HostPart(first * PART, NBYTES, writes)
        events = event_pool(device)
        copies = BlockCopies(blocks, host, Streams(device), events, port, part, driver=driver_of(way, device))
        assert copies.way == way
        assert copies.block_nbytes == PART
        assert await copies.out([5, 0, 2], [4, 0, 3]) == (3 * PART if writes else 0)
        if writes:
            expected[[4, 0, 3], first * PART : (first + 1) * PART] = mine[[5, 0, 2]]
        np.testing.assert_array_equal(host.kv, expected)
        with pytest.raises(InvariantBroken, match="does not exist"):
            copies.out([BLOCKS], [0])
        assert await copies.back([4, 1], [1, 3]) == 2 * PART
        after = sent.copy()
        after[1] = mine[5]
        after[3] = 7
        np.testing.assert_array_equal(blocks.view(torch.uint8).cpu().numpy(), after)
        await copies.aclose()
        await port.aclose()
        assert not events.outstanding
    assert (host.kv[:, 3 * PART :] == 7).all(), "no rank wrote the last part"
    # headers and padding stay as they were
    assert np.count_nonzero(np.frombuffer(host.region.map, np.uint8)) == np.count_nonzero(host.kv)
    host.close()


def test_a_part_that_another_rank_writes_is_checked_and_not_written():
    host = HostArena.create(HOST_BLOCKS, NBYTES)
    host.kv[:] = 7
    rows = BlockRows(torch.zeros((BLOCKS, PART), dtype=torch.uint8), host, HostPart(PART, NBYTES, False))
    assert rows.out([1], [2]) == 0
    assert (host.kv == 7).all()
    with pytest.raises(InvariantBroken, match="does not exist"):
        rows.out([BLOCKS], [0])
    assert rows.back([2], [1]) == PART
    assert (rows.rows[1] == 7).all()
    host.close()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (None, "host blocks have 96 bytes, those of the pool 24"),
        (HostPart(0, 48), "host blocks have 96 bytes, those of the pool 48"),
        (HostPart(73, NBYTES), "24 bytes at 73 of host blocks of 96"),
        (HostPart(-1, NBYTES), "24 bytes at -1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(part, words):
    host = HostArena.create(HOST_BLOCKS, NBYTES)
    with pytest.raises(InvariantBroken, match=words):
        BlockRows(torch.zeros((BLOCKS, PART), dtype=torch.uint8), host, part)
    host.close()
