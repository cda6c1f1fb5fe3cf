"""What ranks ask of the driver to map each other's memory: the calls, their arguments and order, and the ends.

A library stands for the driver's. The two ranks are threads of this process: their exchange waits without the lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor  # threads: a rank each
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fdasync.errors import RunnerError
from fdasync.gpu import peers
from fdasync.gpu.cudart import HANDLE_NBYTES, Driver
from fdasync.gpu.peers import OpenedPeers, OutOfReach, fewest_multiprocessors
from fdasync.ipc.exchange import Exchange, Meeting

CPU = torch.device("cpu")
# of each rank's device
PROCESSORS = (6, 4)
NBYTES = 4096
_SIGNATURES = {
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemsetD8_v2": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuIpcGetMemHandle": (ctypes.c_void_p, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, None, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
}


class FakeDriver:
    """The library of one rank: rank r allocates at 0x1000 * (r + 1), and opens that of rank r at 0xA000 * (r + 1).

    `fails`: names of entry points that return an error. `calls`: what was asked, in order.
    """

    def __init__(self, rank: int, *fails: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._rank, self._fails = rank, fails
        names = ("cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemHostGetDevicePointer_v2", "cuMemcpyAsync")
        for name in (*_SIGNATURES, *names, "cuGetErrorName"):
            setattr(self, name, _Entry(self, name))

    def call(self, entry: _Entry, *args: Any) -> int:
        name = entry.name
        if name == "cuGetErrorName":
            return 1
        wanted = _SIGNATURES[name]
        assert entry.restype is ctypes.c_int
        assert len(entry.argtypes) == len(wanted) == len(args), name
        for kind, want in zip(entry.argtypes, wanted, strict=True):
            assert ctypes.sizeof(kind) == HANDLE_NBYTES if want is None else kind is want, name
        if name in self._fails:
            self.calls.append((name, "fails"))
            return 201
        if name == "cuMemAlloc_v2":
            ctypes.c_uint64.from_address(args[0]).value = 0x1000 * (self._rank + 1)
            self.calls.append((name, args[1]))
        elif name == "cuIpcGetMemHandle":
            ctypes.memset(args[0], 0x30 + self._rank, HANDLE_NBYTES)
            self.calls.append((name, args[1]))
        elif name == "cuIpcOpenMemHandle_v2":
            handle = bytes(args[1])
            other = handle[0] - 0x30
            assert handle == bytes([handle[0]]) * HANDLE_NBYTES
            ctypes.c_uint64.from_address(args[0]).value = 0xA000 * (other + 1)
            self.calls.append((name, other, args[2]))
        else:
            self.calls.append((name, *args))
        return 0


class _Entry:
    def __init__(self, library: FakeDriver, name: str) -> None:
        self.name = name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None
        self._library = library

    def __call__(self, *args: Any) -> int:
        return self._library.call(self, *args)


def opened(monkeypatch: pytest.MonkeyPatch, libraries: list[FakeDriver]) -> list[Any]:
    """Each rank's `OpenedPeers`, or the error of its start."""
    ranks = len(libraries)
    waits: list[torch.device] = []
    of_thread: dict[int, int] = {}

    def properties(_device: torch.device) -> Any:
        return SimpleNamespace(multi_processor_count=PROCESSORS[of_thread[threading.get_ident()]])

    fake = SimpleNamespace(
        get_device_properties=properties, current_stream=lambda _device: None, synchronize=waits.append
    )
    monkeypatch.setattr(peers.torch, "cuda", fake)
    monkeypatch.setattr(peers, "Driver", lambda: Driver(libraries[of_thread[threading.get_ident()]]))
    meeting = Meeting(ranks)

    def be(rank: int) -> Any:
        of_thread[threading.get_ident()] = rank
        exchange = Exchange(rank, ranks, [os.dup(fd) for fd in meeting.fds(rank)], deadline_s=10.0)
        try:
            # of unlike devices the least
            assert fewest_multiprocessors(exchange, CPU) == min(PROCESSORS)
            return OpenedPeers(exchange, CPU, NBYTES)
        except RunnerError as error:
            return error
        finally:
            exchange.close()

    try:
        with ThreadPoolExecutor(ranks) as pool:
            outcomes = list(pool.map(be, range(ranks)))
    finally:
        meeting.close()
    assert all(device == CPU for device in waits)
    return outcomes


def test_each_rank_maps_the_memory_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [FakeDriver(0), FakeDriver(1)]
    both = opened(monkeypatch, libraries)
    for rank, (library, held) in enumerate(zip(libraries, both, strict=True)):
        own, other = 0x1000 * (rank + 1), 1 - rank
        assert library.calls == [
            ("cuMemAlloc_v2", NBYTES),
            ("cuMemsetD8_v2", own, 0xFF, NBYTES),
            ("cuIpcGetMemHandle", own),
            # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            ("cuIpcOpenMemHandle_v2", other, 1),
        ]
        assert held.addresses == ([0x1000, 0xA000 * 2] if rank == 0 else [0xA000, 0x1000 * 2])
        library.calls.clear()
        held.close()
        held.close()
        # first what is another's
        assert library.calls == [("cuIpcCloseMemHandle", 0xA000 * (other + 1)), ("cuMemFree_v2", own)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_does_not_reach_the_others_ends_the_start_of_all(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    libraries = [FakeDriver(one, *["cuIpcOpenMemHandle_v2"] * (one == rank)) for one in range(2)]
    said = opened(monkeypatch, libraries)
    for error in said:
        assert isinstance(error, OutOfReach)
        assert error.problem == f"rank {rank}: memory of another device cannot be opened: error 201"
    for one, library in enumerate(libraries):
        ends = [call for call in library.calls if call[0] in ("cuIpcCloseMemHandle", "cuMemFree_v2")]
        closed = [] if one == rank else [("cuIpcCloseMemHandle", 0xA000 * (rank + 1))]
        assert ends == [*closed, ("cuMemFree_v2", 0x1000 * (one + 1))]


@pytest.mark.parametrize(
    ("entry", "problem", "frees"),
    [
        ("cuMemAlloc_v2", "bytes of device memory cannot be had", [0]),
        ("cuMemsetD8_v2", "bytes of device memory cannot be had", [0, 1]),
        ("cuIpcGetMemHandle", "device memory cannot be shared", [0, 1]),
    ],
)
def test_a_device_without_memory_ends_the_start_of_all(
    monkeypatch: pytest.MonkeyPatch, entry: str, problem: str, frees: list[int]
) -> None:
    libraries = [FakeDriver(0), FakeDriver(1, entry)]
    said = opened(monkeypatch, libraries)
    for error in said:
        assert not isinstance(error, OutOfReach)
        assert error.problem.startswith("rank 1: ")
        assert problem in error.problem
    freed = [rank for rank, library in enumerate(libraries) if ("cuMemFree_v2", 0x1000 * (rank + 1)) in library.calls]
    assert freed == frees
    assert not any(call[0] == "cuIpcOpenMemHandle_v2" for library in libraries for call in library.calls)
