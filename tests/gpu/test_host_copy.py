"""Content of device memory that is kept on the host: by a driver that copies by address, and on a GPU by the real one,
with memory that goes and comes back behind its addresses."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from fdasync.errors import RunnerError
from fdasync.gpu.cudart import Driver
from fdasync.gpu.host_copy import HostCopy
from fdasync.gpu.mapped_memory import MappedMemory

PAGE = mmap.PAGESIZE


class HostDriver:
    """Copies by address; refuses a registration once `refuses`."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False

    def register(self, address: int, nbytes: int) -> int:
        if self.refuses:
            raise RunnerError("the driver refuses")
        assert address % PAGE == 0
        assert address not in self.registered
        self.registered[address] = nbytes
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def copy(self, target: int, source: int, nbytes: int, _stream: int) -> None:
        ctypes.memmove(target, source, nbytes)


@pytest.mark.parametrize("nbytes", [1, PAGE, 5 * PAGE - 3])
def test_what_was_saved_is_restored_from_pages_that_stay(nbytes):
    driver = HostDriver()
    copy = HostCopy(driver, nbytes, 2 * PAGE)
    device = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    address = device.__array_interface__["data"][0]
    for _ in range(2):
        wanted = device.copy()
        copy.save(address, 0)
        registered = dict(driver.registered)
        assert sum(registered.values()) == nbytes
        device[:] ^= 0xFF
        copy.restore(address, 0)
        assert (device == wanted).all()
        device[:] += 1
    assert driver.registered == registered
    copy.close()
    copy.close()
    assert not driver.registered


def test_memory_that_cannot_be_registered_is_told_and_tried_again():
    driver = HostDriver()
    copy = HostCopy(driver, 3 * PAGE, PAGE)
    device = np.arange(3 * PAGE, dtype=np.uint8)
    address = device.__array_interface__["data"][0]
    driver.refuses = True
    with pytest.raises(RunnerError, match="refuses"):
        copy.save(address, 0)
    driver.refuses = False
    copy.save(address, 0)
    device[:] = 0
    copy.restore(address, 0)
    assert (device == np.arange(3 * PAGE, dtype=np.uint8)).all()
    copy.close()
    assert not driver.registered


@pytest.mark.gpu
def test_memory_goes_and_comes_back_behind_its_addresses():
    device, driver, nbytes = torch.device("cuda", 0), Driver(), (256 << 20) + 12345
    torch.zeros(1, device=device)
    memory = MappedMemory.create(driver, device, nbytes)
    copy = HostCopy(driver, nbytes, 64 << 20)
    tensor = memory.tensor()
    tensor.random_(0, 256)
    wanted = tensor.cpu()
    stream = torch.cuda.current_stream(device).cuda_stream
    graph, total = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device=device)
    tensor.sum(dtype=torch.int64)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(tensor.sum(dtype=torch.int64))
    for _ in range(2):
        copy.save(memory.address, stream)
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info()
        memory.release()
        memory.release()
        free, _ = torch.cuda.mem_get_info()
        assert free - before >= nbytes
        memory.regain()
        tensor.zero_()
        copy.restore(memory.address, stream)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(tensor.cpu(), wanted)
        assert int(total) == int(wanted.sum(dtype=torch.int64))
    memory.release()
    copy.close()
    memory.close()


@pytest.mark.gpu
def test_memory_that_another_has_cannot_be_had_back_until_it_goes():
    device, driver = torch.device("cuda", 0), Driver()
    torch.zeros(1, device=device)
    memory = MappedMemory.create(driver, device, 1 << 30)
    memory.release()
    free, _ = torch.cuda.mem_get_info()
    other = [torch.empty(free - (256 << 20), dtype=torch.uint8, device=device)]
    with pytest.raises(RunnerError, match="cuMemCreate"):
        memory.regain()
    other.clear()
    torch.cuda.empty_cache()
    memory.regain()
    memory.tensor().zero_()
    torch.cuda.synchronize()
    memory.close()
