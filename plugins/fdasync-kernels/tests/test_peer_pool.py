"""Pools of a device: checksums by the kernel, copies and their events; on a GPU between processes, and past a kill.

On a CPU memfds stand in for the driver's memory, and a driver of Python functions copies by address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fdasync_kernels.block_sums import run_sums

from fdasync.errors import DeviceFailed, RunnerError
from fdasync.gpu.cudart import Driver
from fdasync.gpu.mapped_memory import MappedMemory
from fdasync.gpu.peer_pool import DevicePool
from fdasync.gpu.pools import EventPool, PinnedPool
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.fake import AlreadyDone, FakeEvent, FakePort
from fdasync.gpu.streams import Streams
from fdasync.ipc.peers.blocks import BlockPull, PoolExport
from fdasync.ipc.peers.rows import PeerRows
from fdasync.ipc.peers.sums import added, block_sums
from fdasync.ipc.shared_memory import SharedRegion

SOURCE = b"s" * 16
gpu = pytest.mark.gpu
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class HostMemory:
    """A memfd in the place of device memory."""

    def __init__(self, region: SharedRegion) -> None:
        self.region = region
        self.nbytes = region.nbytes
        self._view = torch.frombuffer(region.map, dtype=torch.uint8)
        self.address = self._view.data_ptr()

    def tensor(self) -> torch.Tensor:
        return self._view

    def export(self) -> int:
        return os.dup(self.region.fd)

    def close(self) -> None:
        self._view = torch.empty(0, dtype=torch.uint8)
        self.region.close()


class HostDriver:
    """Copies by address; notes the calls."""

    def __init__(self, *, has_batch: bool) -> None:
        self.has_batch = has_batch
        self.calls: list[int] = []
        self.most_calls = 1 << 30

    def copy(self, target: int, source: int, nbytes: int, _stream: int) -> None:
        if len(self.calls) == self.most_calls:
            raise RunnerError("the driver refuses")
        ctypes.memmove(target, source, nbytes)
        self.calls.append(1)

    def copy_batch(self, targets, sources, nbytes, _stream: int) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        self.calls.append(len(targets))


class Pools:
    """A pool of rows and what it needs, on a device or on this host."""

    def __init__(
        self,
        blocks: int,
        block: int,
        device: torch.device,
        *,
        has_batch: bool = True,
        pinned_nbytes: int = 1 << 24,
        by_hand: bool = False,
    ) -> None:
        nbytes = blocks * block
        on_gpu = device.type == "cuda"
        self.driver = Driver() if on_gpu else HostDriver(has_batch=has_batch)
        if on_gpu:
            self.memory = MappedMemory.create(self.driver, device, nbytes)
        else:
            self.memory = HostMemory(SharedRegion.create("pool", nbytes))
        self.tensor = self.memory.tensor()
        self.tensor.zero_()
        self.rows = self.tensor.view(blocks, block)
        self.events = EventPool(torch.cuda.Event if on_gpu else FakeEvent if by_hand else AlreadyDone)
        self.pinned = PinnedPool(pinned_nbytes, pinned=on_gpu)
        self.port = AdaptivePort() if on_gpu else FakePort()
        opener = None if on_gpu else lambda fd, n: HostMemory(SharedRegion(os.dup(fd), n))
        self.pool = DevicePool(
            self.memory,
            self.tensor,
            self.driver,
            Streams(device),
            self.events,
            self.pinned,
            self.port,
            run_sums,
            opener,
        )
        self.own = PoolExport("cuda", nbytes, blocks, 0, block, block, 0, block, 0, block, writes=True)
        self.peers = PeerRows(self.pool, self.own)

    async def aclose(self) -> None:
        await self.peers.aclose()
        await self.port.aclose()
        assert not self.events.outstanding
        assert not self.pinned.outstanding
        self.tensor = self.rows = None
        del self.pool, self.peers
        self.memory.close()


def content(seed: int, blocks: int, block: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (blocks, block), np.uint8))


@pytest.mark.parametrize(("nbytes", "first"), [(8, 0), (72, 8), (8192, 1 << 20), (65544, 16), (200_000, 0)])
def test_the_kernel_sums_as_numpy_does(device, nbytes, first):
    rows = content(nbytes, 3, nbytes)
    memory = torch.cat([torch.zeros(16, dtype=torch.uint8), rows.flatten()]).to(device).view(torch.int64)
    places = torch.tensor([2 + run * nbytes // 8 for run in (2, 0, 1)], device=device)
    sums = run_sums(memory, places, nbytes, first).tolist()
    assert [added(chunks) for chunks in sums] == block_sums(rows.numpy()[[2, 0, 1]], first).tolist()


@pytest.mark.parametrize("has_batch", [True, False])
async def test_a_pool_copies_out_of_another_and_gives_all_back(device, has_batch):
    blocks, block = 5, 4096
    sender, receiver = Pools(blocks, block, device), Pools(blocks, block, device, has_batch=has_batch)
    sent = content(1, blocks, block)
    sender.rows.copy_(sent)
    if device.type == "cuda":
        torch.cuda.synchronize()
    shown = await sender.peers.export()
    if device.type == "cuda":
        # the driver opens in another process only; see below
        for fd in shown.fds:
            os.close(fd)
    else:
        await receiver.peers.open(SOURCE, shown.pools, shown.fds)
        for fd in shown.fds:
            os.close(fd)
        pulled = await receiver.peers.pull(BlockPull(SOURCE, (4, 0), (1, 3)))
        assert pulled == block_sums(sent.numpy()[[4, 0]]).tolist()
        assert receiver.driver.calls == ([2] if has_batch else [1, 1])
        wanted = torch.zeros_like(sent)
        wanted[[1, 3]] = sent[[4, 0]]
        assert torch.equal(receiver.rows, wanted)
        await receiver.peers.close_source(SOURCE)
    assert await sender.peers.sums([2, 1]) == block_sums(sent.numpy()[[2, 1]]).tolist()
    await sender.aclose()
    await receiver.aclose()


@pytest.mark.parametrize("broken", ["no buffer for places", "no buffer for sums", "a copy is refused"])
async def test_what_cannot_be_launched_whole_fails_behind_what_was(monkeypatch, broken):
    blocks, block, host = 5, 4096, torch.device("cpu")
    sender = Pools(blocks, block, host)
    pinned_nbytes = {"no buffer for places": 2048, "no buffer for sums": 4096}.get(broken, 1 << 24)
    receiver = Pools(blocks, block, host, has_batch=False, pinned_nbytes=pinned_nbytes, by_hand=True)
    if broken == "a copy is refused":
        receiver.driver.most_calls = 1
    event = FakeEvent()
    monkeypatch.setattr(receiver.events, "_factory", lambda: event)
    sender.rows.copy_(content(1, blocks, block))
    shown = await sender.peers.export()
    await receiver.peers.open(SOURCE, shown.pools, shown.fds)
    os.close(shown.fds[0])
    pull = receiver.peers.pull(BlockPull(SOURCE, (4, 0), (1, 3)))
    for _ in range(5):
        await asyncio.sleep(0)
    # the device may still copy: neither the targets nor the buffers come back
    assert receiver.driver.calls
    assert not pull.done()
    assert receiver.events.outstanding == {"peers": 1}
    assert bool(receiver.pinned.outstanding) == (broken == "no buffer for sums")
    event.fire()
    with pytest.raises(RunnerError, match="could not be launched"):
        await pull
    await sender.aclose()
    await receiver.aclose()


async def test_without_an_event_nothing_is_launched(monkeypatch):
    pools = Pools(2, 4096, torch.device("cpu"))

    def none():
        raise RuntimeError("no events")

    monkeypatch.setattr(pools.events, "_factory", none)
    shown = await pools.peers.export()
    await pools.peers.open(SOURCE, shown.pools, shown.fds)
    os.close(shown.fds[0])
    with pytest.raises(RunnerError, match="no events"):
        await pools.peers.pull(BlockPull(SOURCE, (0,), (1,)))
    assert pools.driver.calls == []
    await pools.aclose()


async def test_copies_whose_end_cannot_be_watched_keep_what_they_use(monkeypatch):
    pools = Pools(2, 4096, torch.device("cpu"))
    shown = await pools.peers.export()
    await pools.peers.open(SOURCE, shown.pools, shown.fds)
    os.close(shown.fds[0])

    def fail(*_):
        raise RuntimeError("no context")

    monkeypatch.setattr(pools.pool._streams, "record", fail)
    with pytest.raises(DeviceFailed, match="nothing tells when copies from a peer end: no context"):
        await pools.peers.pull(BlockPull(SOURCE, (0,), (1,)))
    assert pools.driver.calls == [1]
    assert pools.events.outstanding == {"peers": 1}
    assert pools.pinned.outstanding
    await pools.peers.aclose()
    await pools.port.aclose()
    pools.tensor = pools.rows = None
    del pools.pool, pools.peers
    pools.memory.close()


@gpu
@no_gpu
class TestBetweenProcesses:
    """Two processes on one GPU, each with a context of its own."""

    def _sender(self, here: socket.socket, there: socket.socket, blocks: int, block: int) -> subprocess.Popen[bytes]:
        child = Path(__file__).parent / "support/peer_pool_child.py"
        fd = there.fileno()
        command = [sys.executable, str(child), str(fd), str(blocks), str(block)]
        process = subprocess.Popen(command, pass_fds=[fd])
        there.close()
        here.settimeout(120.0)
        return process

    @pytest.mark.parametrize("kill", ["after", "middle"])
    def test_a_sender_that_is_killed_is_still_read(self, kill):
        blocks, block = 96, 24 << 20
        here, there = socket.socketpair()
        process = self._sender(here, there, blocks, block)
        try:
            _, fds, _, _ = socket.recv_fds(here, 1, 1)
            asyncio.run(self._play(process, fds, blocks, block, kill))
        finally:
            here.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    async def _play(self, process, fds, blocks, block, kill):
        # 60 pulls hold places and checksums of all chunks at once
        receiver = Pools(blocks, block, torch.device("cuda"), pinned_nbytes=1 << 26)
        await receiver.peers.open(SOURCE, [receiver.own], fds)
        os.close(fds[0])
        first = await receiver.peers.pull(BlockPull(SOURCE, (0, 1), (0, 1)))
        both = tuple(range(blocks))
        # several rounds in the queue, so that the kill meets a copy
        pulls = [receiver.peers.pull(BlockPull(SOURCE, both, both)) for _ in range(60 if kill == "middle" else 0)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        gone_at = time.perf_counter()
        for pull in pulls:
            assert (await pull)[:2] == first
        if pulls:
            took_ms = (time.perf_counter() - gone_at) * 1e3
            print(
                f"{len(pulls)} pulls of {blocks * block >> 20} MiB went on for {took_ms:.1f} ms after the sender's end"
            )
        # and again, when the process is gone
        assert (await receiver.peers.pull(BlockPull(SOURCE, (1, 0), (5, 6)))) == first[::-1]
        seen = receiver.rows[:8, :4096].cpu()
        base = torch.arange(4096) % 251
        for place, block_id in ((0, 0), (1, 1), (5, 1), (6, 0)):
            assert torch.equal(seen[place], (base + block_id).to(torch.uint8)), (place, block_id)
        # the receiver's device works as before
        assert await receiver.peers.sums([5, 6]) == first[::-1]
        await receiver.peers.close_source(SOURCE)
        with pytest.raises(RunnerError):
            await receiver.peers.pull(BlockPull(SOURCE, (0,), (0,)))
        reader, writer = os.pipe()
        with pytest.raises(RunnerError):
            await receiver.peers.open(SOURCE, [receiver.own], [reader])
        os.close(reader)
        os.close(writer)
        await receiver.aclose()
