"""Block copies: bytes, ids, cancelling and closing, by every way to launch them; on a GPU through real streams.

On the CPU a driver of Python functions stands in for the real one, whose addresses are not the host's own, so that
ways that name addresses are held to the driver's.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.cache.host_arena import HostArena
from fdasync.errors import DeadlineExceeded, DeviceFailed, InvariantBroken, RunnerError
from fdasync.gpu.block_copies import BlockCopies
from fdasync.gpu.cudart import Driver, RegisteredHost
from fdasync.gpu.pools import EventPool
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.fake import AlreadyDone, FakePort
from fdasync.gpu.streams import Streams

BLOCKS, HOST_BLOCKS, NBYTES = 12, 9, 96
COUNTS = st.integers(0, HOST_BLOCKS)
WAYS = ["rows", "batch", "old batch", "single"]


class HandPort:
    """Asks events once a turn; while `held`, sees nothing."""

    def __init__(self) -> None:
        self.held = False
        self.waiting: deque = deque()
        self.problem: Exception | None = None

    def completion(self, event, *, lane, kind, holds):
        future = asyncio.get_running_loop().create_future()
        assert kind[0] == lane
        self.waiting.append((event, holds, future))
        self.look()
        return future

    def look(self) -> None:
        if self.held or not self.waiting:
            return
        event, holds, future = self.waiting[0]
        if self.problem is not None or event.query():
            self.waiting.popleft()
            if self.problem is not None:
                future.set_exception(self.problem)
            else:
                for hold in holds:
                    hold.release()
                future.set_result(None)
        asyncio.get_running_loop().call_soon(self.look)

    def free(self) -> None:
        self.held = False
        self.look()

    async def aclose(self) -> None:
        assert not self.waiting


def event_pool(device: torch.device) -> EventPool:
    return EventPool(torch.cuda.Event if device.type == "cuda" else AlreadyDone)


class Library:
    """The driver's calls over this process's own memory; the "device" knows pages by other addresses."""

    def __init__(self, shift: int, batch: str = "cuMemcpyBatchAsync_v2") -> None:
        self.pages: dict[int, int] = {}
        self.calls: list[int] = []
        self.status = 0
        self.fail_from = 1 << 62

        def own(address: int, nbytes: int) -> int:
            for start, size in self.pages.items():
                if start + shift <= address and address + nbytes <= start + shift + size:
                    return address - shift
            assert not any(start < address + nbytes and address < start + size for start, size in self.pages.items())
            return address

        def register(address, nbytes, flags):
            if len(self.pages) >= self.fail_from:
                return 2
            self.pages[address] = nbytes
            return 0

        def pointer(found, address, flags):
            ctypes.c_uint64.from_address(found).value = address + shift
            return 0

        def copy(target, source, nbytes, stream):
            self.calls.append(1)
            if not self.status:
                ctypes.memmove(own(target, nbytes), own(source, nbytes), nbytes)
            return self.status

        def many(targets, sources, sizes, count, attributes, first, attribute_count, *rest):
            assert len(rest) == (1 if batch.endswith("_v2") else 2)
            self.calls.append(count)
            ends = [np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(a)) for a in (targets, sources, sizes)]
            for target, source, nbytes in zip(*(array.tolist() for array in ends), strict=True):
                ctypes.memmove(own(target, nbytes), own(source, nbytes), nbytes)
            return self.status

        def name(status, found):
            ctypes.c_char_p.from_address(found).value = b"CUDA_ERROR_SOMETHING"
            return 0

        def unregister(address):
            del self.pages[address]
            return 0

        self.cuMemHostRegister_v2 = register
        self.cuMemHostUnregister = unregister
        self.cuMemHostGetDevicePointer_v2 = pointer
        self.cuMemcpyAsync = copy
        self.cuGetErrorName = name
        if batch:
            setattr(self, batch, many)


class Bed:
    """A pool and an arena of noise, and copies between them."""

    def __init__(self, device: torch.device, way: str, *, nbytes: int = NBYTES, by_hand: bool = False) -> None:
        self.device, self.way = device, way
        rng = np.random.default_rng(5)
        self.pool_bytes = rng.integers(0, 256, (BLOCKS, nbytes), np.uint8)
        self.blocks = torch.from_numpy(self.pool_bytes.copy()).to(device).view(torch.bfloat16)
        self.host = HostArena.create(HOST_BLOCKS, nbytes)
        self.host_bytes = rng.integers(0, 256, (HOST_BLOCKS, nbytes), np.uint8)
        self.host.kv[:] = self.host_bytes
        self.library: Library | None = None
        driver = None
        if device.type == "cpu" and way != "rows":
            old = {"old batch": "cuMemcpyBatchAsync", "single": ""}
            self.library = Library(1 << 46, old.get(way, "cuMemcpyBatchAsync_v2"))
            driver = Driver(self.library)
        elif way == "single":
            driver = Driver()
            driver.has_batch = False
        self.events = event_pool(device)
        self.port = HandPort() if by_hand else AdaptivePort() if device.type == "cuda" else FakePort()
        self.copies = BlockCopies(self.blocks, self.host, Streams(device), self.events, self.port, driver=driver)
        assert self.copies.way == way.removeprefix("old ")
        self.registered = self.copies._registered

    def pool(self) -> np.ndarray:
        return self.blocks.view(torch.uint8).cpu().numpy()

    async def close(self) -> None:
        await self.copies.aclose()
        await self.port.aclose()
        assert not self.events.outstanding
        assert self.library is None or not self.library.pages
        self.host.close()

    def give_up(self) -> None:
        """After a failure: the pages are still registered, and are let go of here for the tests to come."""
        assert self.library is None or self.library.pages
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        pages = self.registered._pages
        self.registered.close()
        # of the reference that keeps a mapping for good
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(pages))
        del pages
        self.host.close()


@pytest.fixture(params=WAYS)
def way(request, device) -> str:
    if device.type == "cuda" and request.param in ("rows", "old batch"):
        pytest.skip("the CPU's")
    return request.param


@pytest.mark.both_loops
async def test_blocks_move_out_and_back(device, way):
    bed = Bed(device, way)
    assert await bed.copies.out([3, 0, 11], [8, 2, 0]) == 3 * NBYTES
    expected = bed.host_bytes.copy()
    expected[[8, 2, 0]] = bed.pool_bytes[[3, 0, 11]]
    np.testing.assert_array_equal(bed.host.kv, expected)
    assert await bed.copies.back([8, 5], [1, 2]) == 2 * NBYTES
    after = bed.pool_bytes.copy()
    after[[1, 2]] = expected[[8, 5]]
    np.testing.assert_array_equal(bed.pool(), after)
    np.testing.assert_array_equal(bed.host.kv, expected)
    assert await bed.copies.out([], []) == 0
    await bed.close()


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_permutation(device, data):
    way = data.draw(st.sampled_from(["batch", "single", *(["rows"] if device.type == "cpu" else [])]))
    nbytes = data.draw(st.sampled_from([2, 14, 24, 4096, 20_004]))
    calls = data.draw(
        st.lists(
            st.tuples(st.booleans(), st.permutations(range(BLOCKS)), st.permutations(range(HOST_BLOCKS)), COUNTS),
            min_size=1,
            max_size=3,
        )
    )

    async def play() -> None:
        bed = Bed(device, way, nbytes=nbytes)
        pool, host = bed.pool_bytes, bed.host_bytes
        for out, device_ids, host_ids, count in calls:
            there, here = device_ids[:count], host_ids[:count]
            if out:
                await bed.copies.out(there, here)
                host[here] = pool[there]
            else:
                await bed.copies.back(here, there)
                pool[there] = host[here]
        np.testing.assert_array_equal(bed.pool(), pool)
        np.testing.assert_array_equal(bed.host.kv, host)
        await bed.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("device_ids", "host_ids", "words"),
    [
        ([0, 12], [0, 1], "device block 12 does not exist, there are 12"),
        ([0, -1], [0, 1], "device block -1 does not exist"),
        ([0, 1], [9, 1], "host block 9 does not exist, there are 9"),
        ([0, 1], [-2, 1], "host block -2 does not exist"),
        ([0, 1], [1], "2 device blocks and 1 host blocks"),
    ],
)
async def test_ids_are_checked_before_anything_moves(device, way, device_ids, host_ids, words):
    bed = Bed(device, way)
    with pytest.raises(InvariantBroken, match=words):
        bed.copies.out(device_ids, host_ids)
    with pytest.raises(InvariantBroken, match=words):
        bed.copies.back(host_ids, device_ids)
    np.testing.assert_array_equal(bed.host.kv, bed.host_bytes)
    np.testing.assert_array_equal(bed.pool(), bed.pool_bytes)
    await bed.close()


async def test_a_block_has_one_writer_and_many_readers(device):
    bed = Bed(device, "batch")
    with pytest.raises(InvariantBroken, match="write the same block"):
        bed.copies.out([1, 2], [3, 3])
    with pytest.raises(InvariantBroken, match="write the same block"):
        bed.copies.back([1, 2], [3, 3])
    await bed.copies.out([1, 1], [3, 4])
    np.testing.assert_array_equal(bed.host.kv[[3, 4]], bed.pool_bytes[[1, 1]])
    await bed.close()


async def test_what_does_not_fit_is_refused(device):
    host = HostArena.create(2, 64)
    streams, pool, port = Streams(device), event_pool(device), HandPort()
    with pytest.raises(InvariantBroken, match="host blocks have 64 bytes, those of the pool 32"):
        BlockCopies(torch.zeros((4, 16), dtype=torch.bfloat16, device=device), host, streams, pool, port)
    with pytest.raises(InvariantBroken, match="one run of bytes"):
        BlockCopies(torch.zeros((64, 4), dtype=torch.uint8, device=device).T, host, streams, pool, port)
    host.close()


@pytest.mark.both_loops
async def test_cancel_stops_the_waiting_only(device, way):
    bed = Bed(device, way, by_hand=True)
    bed.port.held = True
    waiter = bed.copies.out([4, 5], [0, 1])
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert bed.events.outstanding == {"copy_out": 1}
    closing = asyncio.ensure_future(bed.copies.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    bed.port.free()
    await closing
    np.testing.assert_array_equal(bed.host.kv[[0, 1]], bed.pool_bytes[[4, 5]])
    await bed.close()


@pytest.mark.both_loops
async def test_a_close_waits_for_copies_and_is_bounded(device, way):
    bed = Bed(device, way, by_hand=True)
    bed.port.held = True
    first, second = bed.copies.out([4], [0]), bed.copies.back([1, 2], [0, 1])
    with pytest.raises(DeadlineExceeded, match="copy_out of 1 blocks, copy_in of 2 blocks"):
        await bed.copies.aclose(0.01)
    if bed.library is not None:
        assert bed.library.pages, "the device may still write to pages that it lost"
    with pytest.raises(InvariantBroken, match="after the close"):
        bed.copies.out([1], [1])
    bed.port.free()
    assert await asyncio.gather(first, second) == [NBYTES, 2 * NBYTES]
    await bed.copies.aclose()
    await bed.close()


async def test_a_start_that_fails_elsewhere_unpins_at_once(device, way):
    bed = Bed(device, way, by_hand=True)
    bed.port.held = True
    waiter = bed.copies.out([4], [0])
    with pytest.raises(InvariantBroken, match="1 copies are in flight"):
        bed.copies.unpin()
    bed.port.free()
    await waiter
    bed.copies.unpin()
    assert bed.library is None or not bed.library.pages
    with pytest.raises(InvariantBroken, match="after the close"):
        bed.copies.out([1], [1])
    bed.copies.unpin()
    await bed.close()


@pytest.mark.both_loops
async def test_an_error_of_the_device_keeps_the_pages(device):
    bed = Bed(device, "batch", by_hand=True)
    bed.port.problem = DeviceFailed("lost")
    first = bed.copies.out([4], [0])
    second = bed.copies.out([5], [1])
    second.cancel()
    with pytest.raises(DeviceFailed, match="lost"):
        await first
    await bed.copies.aclose()
    assert bed.copies.lost == 2
    assert bed.events.outstanding == {"copy_out": 2}
    bed.give_up()


async def test_a_launch_that_fails_fails_its_future():
    bed = Bed(torch.device("cpu"), "single")
    bed.library.status = 700
    with pytest.raises(DeviceFailed, match=r"CUDA_ERROR_SOMETHING \(700\)"):
        await bed.copies.out([4], [0])
    assert bed.copies.lost == 1
    await bed.copies.aclose()
    bed.give_up()


async def test_a_long_call_gives_way_to_the_loop(device, way, monkeypatch):
    bed = Bed(device, way)
    monkeypatch.setattr(bed.copies._way, "at_once", 2)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not waiter.done():
            asyncio.get_running_loop().call_soon(turn)

    asyncio.get_running_loop().call_soon(turn)
    waiter = bed.copies.out([7, 6, 5, 4, 3], [0, 1, 2, 3, 4])
    # begun later, done before
    other = bed.copies.out([0], [8])
    ended = []
    other.add_done_callback(ended.append)
    waiter.add_done_callback(ended.append)
    assert await waiter == 5 * NBYTES
    assert ended == [other, waiter]
    assert other.result() == NBYTES
    assert turns >= 2
    np.testing.assert_array_equal(bed.host.kv[:5], bed.pool_bytes[[7, 6, 5, 4, 3]])
    if bed.library is not None and way == "batch":
        assert bed.library.calls == [2, 1, 2, 1]
    await bed.close()


async def test_calls_of_like_size_are_of_one_kind(device):
    bed = Bed(device, "batch")
    jobs = [SimpleNamespace(lane="copy_in", device=range(count)) for count in range(1, 1025)]
    kinds = [bed.copies._kind(job) for job in jobs]
    assert len(set(kinds)) < 70
    assert kinds[6] == ("copy_in", 7)
    assert all(count * 8 / 9 <= kind[1] <= count for count, kind in enumerate(kinds, 1))
    await bed.close()


def test_pages_are_registered_in_pieces_between_blocks():
    library = Library(1 << 46)
    host = HostArena.create(5, 6000)
    registered = RegisteredHost(Driver(library), host, piece_nbytes=2 * host.stride_nbytes + 100)
    assert list(library.pages.values()) == [size * host.stride_nbytes for size in (2, 2, 1)]
    own = [host.kv[block].ctypes.data for block in range(5)]
    assert [int(address) - (1 << 46) for address in registered.addresses] == own
    assert not registered.same
    registered.close()
    registered.close()
    assert not library.pages
    library.fail_from = 2
    with pytest.raises(RunnerError, match=r"cannot be registered: CUDA_ERROR_SOMETHING \(2\)"):
        RegisteredHost(Driver(library), host, piece_nbytes=host.stride_nbytes)
    assert not library.pages
    host.close()


def test_streams_have_the_same_names_everywhere(device):
    streams = Streams(device)
    event = torch.cuda.Event() if device.type == "cuda" else AlreadyDone()
    streams.follow()
    for name in ("compute", "results", "copy_out", "copy_in"):
        with streams.on(name):
            if device.type == "cuda":
                assert torch.cuda.current_stream() == streams.of(name)
        assert (streams.handle(name) != 0) == (device.type == "cuda")
        streams.record(name, event)
        streams.wait(name, event)
    for call in (streams.of, streams.handle, streams.on):
        with pytest.raises(KeyError):
            call("copy")


@pytest.mark.gpu
async def test_copies_run_beside_a_step(device):
    bed = Bed(device, "batch")
    step = torch.cuda.Event()
    streams = bed.copies._streams
    with streams.on("compute"):
        torch.cuda._sleep(2_000_000_000)
    streams.record("compute", step)
    assert await bed.copies.out([1], [2]) == NBYTES
    assert not step.query(), "a copy waited for the step"
    torch.cuda.synchronize()
    await bed.close()
