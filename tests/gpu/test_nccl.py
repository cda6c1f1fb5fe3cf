"""The binding of NCCL: what it asks of the library, what it refuses, and what GPUs gather by it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor  # threads: a rank each
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fdasync.errors import DeviceFailed, InvariantBroken, RunnerError
from fdasync.gpu.nccl import NcclGroup
from fdasync.ipc.exchange import Exchange, Meeting

CPU = torch.device("cpu")


class Library:
    """Stands for NCCL's, of a group of one rank: gathering is a copy."""

    def __init__(self, **fails: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails
        for name in ("ncclGetErrorString", "ncclGetUniqueId", "ncclCommInitRank", "ncclAllGather"):
            setattr(self, name, self._entry(name))

    def _entry(self, name: str) -> Any:
        def entry(*args: Any) -> Any:
            if name == "ncclGetErrorString":
                return f"error {args[0]}".encode()
            self.calls.append((name, *args))
            if name == "ncclGetUniqueId":
                ctypes.memset(ctypes.addressof(args[0]._obj), 7, 128)
            elif name == "ncclCommInitRank":
                args[0]._obj.value = 99
            elif name == "ncclAllGather":
                ctypes.memmove(args[1], args[0], args[2])
            return self._fails.get(name, 0)

        return entry


def group_of_one(monkeypatch: pytest.MonkeyPatch, library: Any) -> NcclGroup:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=5))
    meeting = Meeting(1)
    try:
        exchange = Exchange(0, 1, meeting.fds(0), deadline_s=5)
        return NcclGroup(exchange, CPU, library)
    finally:
        meeting.close()


def test_ranks_join_by_the_identifier_of_rank_0_and_gather_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    group = group_of_one(monkeypatch, library)
    name, _, ranks, told, rank = library.calls[-1]
    assert (name, ranks, rank, bytes(told)) == ("ncclCommInitRank", 1, 0, b"\7" * 128)
    own, into = torch.arange(6, dtype=torch.bfloat16), torch.zeros((1, 6), dtype=torch.bfloat16)
    group.all_gather(own, into)
    assert torch.equal(into[0], own)
    name, source, target, nbytes, kind, comm, stream = library.calls[-1]
    assert (source, target, nbytes, kind, comm.value, stream) == (own.data_ptr(), into.data_ptr(), 12, 1, 99, 5)


def test_two_ranks_join_by_the_identifier_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [Library(), Library()]
    meeting = Meeting(2)

    def be(rank: int) -> NcclGroup:
        exchange = Exchange(rank, 2, [os.dup(fd) for fd in meeting.fds(rank)], deadline_s=10.0)
        try:
            return NcclGroup(exchange, CPU, libraries[rank])
        finally:
            exchange.close()

    try:
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(be, range(2)))
    finally:
        meeting.close()
    # only rank 0 makes one
    assert [[call[0] for call in library.calls] for library in libraries] == [
        ["ncclGetUniqueId", "ncclCommInitRank"],
        ["ncclCommInitRank"],
    ]
    for rank, (library, group) in enumerate(zip(libraries, groups, strict=True)):
        _, comm, ranks, told, own = library.calls[-1]
        assert (ranks, own, group.ranks, comm._obj.value) == (2, rank, 2, 99)
        assert bytes(told) == b"\7" * 128
        address, number = ctypes.c_void_p, ctypes.c_int
        init = library.ncclCommInitRank.argtypes
        assert (init[0], init[1], init[3]) == (address, number, number)
        # by value, as NCCL takes it
        assert issubclass(init[2], ctypes.Structure)
        assert ctypes.sizeof(init[2]) == 128
        assert library.ncclAllGather.argtypes == (address, address, ctypes.c_size_t, number, address, address)
        assert library.ncclGetErrorString.restype is ctypes.c_char_p
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=5))
    own, into = torch.arange(3, dtype=torch.int32), torch.zeros((2, 3), dtype=torch.int32)
    groups[1].all_gather(own, into)
    # what each rank gives, not what all give
    assert libraries[1].calls[-1][3] == 12


def test_what_cannot_be_gathered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of_one(monkeypatch, Library(ncclAllGather=3))
    for own, into, problem in (
        (torch.zeros(4), torch.zeros((2, 4)), r"\[4\] of 1 ranks gathered into \[2, 4\]"),
        (torch.zeros(4), torch.zeros((1, 4), dtype=torch.int32), "gathered into"),
        (torch.zeros((4, 4)).t(), torch.zeros((1, 4, 4)), "strides"),
        (torch.zeros(4, device="meta"), torch.zeros((1, 4)), "meta"),
    ):
        with pytest.raises(InvariantBroken, match=problem):
            group.all_gather(own, into)
    with pytest.raises(DeviceFailed, match="16 bytes of each rank by NCCL: error 3"):
        group.all_gather(torch.zeros(4), torch.zeros((1, 4)))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("ncclGetUniqueId", "NCCL: an identifier of a group cannot be had: error 2"),
        ("ncclCommInitRank", "NCCL: rank 0 of 1 cannot join: error 2"),
    ],
)
def test_a_group_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    with pytest.raises(RunnerError, match=problem):
        group_of_one(monkeypatch, Library(**{name: 2}))


def test_a_machine_without_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_name: str) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", lacking)
    with pytest.raises(RunnerError, match=r"NCCL cannot be loaded: libnccl\.so\.2"):
        group_of_one(monkeypatch, None)


@pytest.mark.gpu
def test_processes_gather_by_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    meeting = Meeting(2)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu._nccl_child", str(rank), "2", *map(str, meeting.fds(rank))],
            pass_fds=meeting.fds(rank),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    meeting.close()
    try:
        said = [child.communicate(timeout=600)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], said
