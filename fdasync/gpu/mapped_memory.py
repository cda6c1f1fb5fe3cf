"""Device memory that other processes map by a file descriptor, by the CUDA driver's calls for virtual memory.

Unlike memory behind the driver's older interprocess handles (`peers.py`), it is counted by its users: a process that
maps it keeps it alive, and reads it as before when the process that made it has closed it or was killed. Every mapping
can be written to, as the hardware has it; the caller names a peer's memory as a source only.

Works in the context that torch made current. Knows no blocks. Called by runners, and by `peer_pool.py`.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from fdasync.errors import RunnerError
from fdasync.gpu.cudart import Driver, Location

# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
# CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PINNED, _POSIX_FD, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 1, 3, 0


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class _Bytes:
    """What torch makes a tensor of without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class MappedMemory:
    """One allocation, mapped for one device. Made by `create` or `open`.

    Attributes:
        address: of the first byte.
        nbytes: bytes that are used; the mapping is longer by less than the driver's granularity.
    """

    def __init__(self, driver: Driver, device: torch.device, nbytes: int) -> None:
        self._driver = driver
        self._device = device
        self.nbytes = nbytes
        self.address = 0
        self._handle = 0
        self._mapped = False
        # "cuda" without a number has none
        named: Any = device.index
        index = torch.cuda.current_device() if named is None else int(named)
        self._location = Location(_DEVICE, index)
        self._properties = _Properties(_PINNED, _POSIX_FD, self._location)
        # the driver works in the context that torch made current
        torch.cuda.current_stream(device)
        found = ctypes.c_size_t(0)
        self._call(
            "cuMemGetAllocationGranularity",
            (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            (ctypes.addressof(found), ctypes.addressof(self._properties), _MINIMUM),
        )
        self._whole_nbytes = max(1, -(-nbytes // found.value)) * found.value

    @classmethod
    def create(cls, driver: Driver, device: torch.device, nbytes: int) -> MappedMemory:
        """New memory, of any content. Raises RunnerError where the device has none, or cannot share it."""
        memory = cls(driver, device, nbytes)
        memory._make()
        return memory._map()

    def _make(self) -> None:
        handle = ctypes.c_uint64(0)
        self._call(
            "cuMemCreate",
            (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong),
            (ctypes.addressof(handle), self._whole_nbytes, ctypes.addressof(self._properties), 0),
        )
        self._handle = handle.value

    @classmethod
    def open(cls, driver: Driver, device: torch.device, fd: int, nbytes: int) -> MappedMemory:
        """Another process's memory. The descriptor stays the caller's. Raises RunnerError where it is no such
        descriptor, the memory is smaller, or `device` does not reach it."""
        memory = cls(driver, device, nbytes)
        handle = ctypes.c_uint64(0)
        memory._call(
            "cuMemImportFromShareableHandle",
            (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            (ctypes.addressof(handle), fd, _POSIX_FD),
        )
        memory._handle = handle.value
        return memory._map()

    def _map(self) -> MappedMemory:
        size, number = ctypes.c_size_t, ctypes.c_ulonglong
        found = ctypes.c_uint64(0)
        try:
            self._call(
                "cuMemAddressReserve",
                (ctypes.c_void_p, size, size, ctypes.c_uint64, number),
                (ctypes.addressof(found), self._whole_nbytes, 0, 0, 0),
            )
            self.address = found.value
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _attach(self) -> None:
        """Map the allocation at its address."""
        address, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong
        access = _Access(self._location, _READ_WRITE)
        self._call(
            "cuMemMap",
            (address, size, size, ctypes.c_uint64, number),
            (self.address, self._whole_nbytes, 0, self._handle, 0),
        )
        self._mapped = True
        self._call(
            "cuMemSetAccess",
            (address, size, ctypes.c_void_p, size),
            (self.address, self._whole_nbytes, ctypes.addressof(access), 1),
        )

    def release(self) -> None:
        """Give the memory back to the device and keep its addresses, which nothing may use until `regain`; idempotent.
        No work that uses it may be in flight. Where others have it mapped, they keep it."""
        self._unmap()
        handle, self._handle = self._handle, 0
        if handle:
            self._call("cuMemRelease", (ctypes.c_uint64,), (handle,))

    def regain(self) -> None:
        """Other memory of any content at the same addresses, after `release`. Raises RunnerError where the device has
        none left; nothing has changed then."""
        self._make()
        try:
            self._attach()
        except BaseException:
            self.release()
            raise

    def _unmap(self) -> None:
        if self._mapped:
            self._mapped = False
            self._call("cuMemUnmap", (ctypes.c_uint64, ctypes.c_size_t), (self.address, self._whole_nbytes))

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes], the memory itself. It may not be used after `close`."""
        return torch.as_tensor(_Bytes(self.address, self.nbytes), device=self._device)

    def export(self) -> int:
        """A new descriptor, the caller's. Raises RunnerError."""
        fd = ctypes.c_int(-1)
        self._call(
            "cuMemExportToShareableHandle",
            (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_ulonglong),
            (ctypes.addressof(fd), self._handle, _POSIX_FD, 0),
        )
        os.set_inheritable(fd.value, False)
        return fd.value

    def close(self) -> None:
        """Unmap it; idempotent. No work that uses it may be in flight. Other mappings keep the memory."""
        self._unmap()
        if self.address:
            self._call("cuMemAddressFree", (ctypes.c_uint64, ctypes.c_size_t), (self.address, self._whole_nbytes))
            self.address = 0
        handle, self._handle = self._handle, 0
        if handle:
            self._call("cuMemRelease", (ctypes.c_uint64,), (handle,))

    def _call(self, name: str, kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        status = self._driver.call(name, kinds, arguments)
        if status:
            raise RunnerError(f"{name} of {self.nbytes} bytes of {self._device}: {self._driver.words(status)}")
