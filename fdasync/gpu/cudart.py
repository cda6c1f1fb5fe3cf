"""The few calls of the CUDA driver that torch does not offer, and host memory registered by them.

The driver's entry points keep their signatures for ever; the runtime's change with its major version. So the driver
copies batches: by `cuMemcpyBatchAsync_v2` (CUDA 13), else by `cuMemcpyBatchAsync` (12.8, which also returns the index
of a failed copy). Works in the context that torch made current on the calling thread. Knows addresses, and not what
blocks mean. Called by `block_copies.py`; importing the module loads no driver.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync.errors import DeviceFailed, RunnerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena

# CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_REGISTER_FLAGS = 3
# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read in stream order
_ORDER_STREAM = 1
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, not multiprocessors
_PREFER_OVERLAP = 1
# most bytes of one registration: a driver may refuse a very large one
PIECE_NBYTES = 1 << 30
#: of a handle by which another process opens memory of a device
HANDLE_NBYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_LAZY_PEER_ACCESS = 1


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", ctypes.c_uint),
    )


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_NBYTES),)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


class Driver:
    """The driver's calls. Raises RunnerError where there is no driver.

    Attributes:
        has_batch: whether the driver copies batches, so that `copy_batch` works.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise RunnerError(f"the CUDA driver cannot be loaded: {error}") from error
        address, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._register = self._entry("cuMemHostRegister_v2", handle, size, ctypes.c_uint)
        self._unregister = self._entry("cuMemHostUnregister", handle)
        self._device_pointer = self._entry("cuMemHostGetDevicePointer_v2", handle, handle, ctypes.c_uint)
        self._copy = self._entry("cuMemcpyAsync", address, address, size, handle)
        self._attributes = _Attributes(src_access_order=_ORDER_STREAM, flags=_PREFER_OVERLAP)
        # index of the first copy that the attributes are for
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        arrays = (handle, handle, handle, size, handle, handle, size)
        self._tail: tuple[Any, ...] = ()
        self._batch = None
        if hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            self._batch = self._entry("cuMemcpyBatchAsync_v2", *arrays, handle)
        elif hasattr(self._library, "cuMemcpyBatchAsync"):
            self._batch = self._entry("cuMemcpyBatchAsync", *arrays, handle, handle)
            self._tail = (ctypes.addressof(self._failed),)
        self.has_batch = self._batch is not None

    def register(self, address: int, nbytes: int) -> int:
        """Pin these pages and map them for every device; returns their address on the device.

        Makes the kernel provide all of the pages. Raises RunnerError, and nothing is registered then.
        """
        status = self._register(address, nbytes, _REGISTER_FLAGS)
        if status:
            raise RunnerError(f"{nbytes} bytes of host memory cannot be registered: {self.words(status)}")
        found = ctypes.c_uint64(0)
        status = self._device_pointer(ctypes.addressof(found), address, 0)
        if status:
            self._unregister(address)
            raise RunnerError(f"registered host memory has no address on the device: {self.words(status)}")
        return found.value

    def unregister(self, address: int) -> None:
        """Undo `register`; waits for the device where the driver must. Raises RunnerError."""
        status = self._unregister(address)
        if status:
            raise RunnerError(f"host memory cannot be unregistered: {self.words(status)}")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One copy on a stream. Raises DeviceFailed."""
        status = self._copy(target, source, nbytes, stream)
        if status:
            raise DeviceFailed(f"a copy of {nbytes} bytes could not be launched: {self.words(status)}")

    def copy_batch(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: NDArray[np.uint64], stream: int
    ) -> None:
        """Copies in one call, in any order among themselves; the arrays (C-contiguous, of one length) are read at once.

        `stream` may not be the default one (0). Raises DeviceFailed.
        """
        if self._batch is None:
            raise DeviceFailed("this driver has no copies in batches")
        status = self._batch(
            _address(targets),
            _address(sources),
            _address(nbytes),
            len(targets),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            *self._tail,
            stream,
        )
        if status:
            raise DeviceFailed(f"{len(targets)} copies could not be launched: {self.words(status)}")

    def allocate(self, nbytes: int, filled: int = 0) -> int:
        """The address of new memory on the current device, filled with the byte `filled`. Raises RunnerError."""
        found = ctypes.c_uint64(0)
        status = self._entry("cuMemAlloc_v2", ctypes.c_void_p, ctypes.c_size_t)(ctypes.addressof(found), nbytes)
        if not status:
            status = self._entry("cuMemsetD8_v2", ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t)(
                found.value, filled, nbytes
            )
            if status:
                self._entry("cuMemFree_v2", ctypes.c_uint64)(found.value)
        if status:
            raise RunnerError(f"{nbytes} bytes of device memory cannot be had: {self.words(status)}")
        return found.value

    def free(self, address: int) -> None:
        """Undo `allocate`. Raises RunnerError."""
        status = self._entry("cuMemFree_v2", ctypes.c_uint64)(address)
        if status:
            raise RunnerError(f"device memory cannot be freed: {self.words(status)}")

    def share(self, address: int) -> bytes:
        """The handle of memory that `allocate` made, for `open_shared` in another process. Raises RunnerError."""
        handle = _Handle()
        get = self._entry("cuIpcGetMemHandle", ctypes.c_void_p, ctypes.c_uint64)
        status = get(ctypes.addressof(handle), address)
        if status:
            raise RunnerError(f"device memory cannot be shared: {self.words(status)}")
        return bytes(handle)

    def open_shared(self, handle: bytes) -> int:
        """The address, on the current device, of memory that another process shares. Raises RunnerError where the
        device does not reach it."""
        found = ctypes.c_uint64(0)
        open_handle = self._entry("cuIpcOpenMemHandle_v2", ctypes.c_void_p, _Handle, ctypes.c_uint)
        given = _Handle.from_buffer_copy(handle)
        status = open_handle(ctypes.addressof(found), given, _LAZY_PEER_ACCESS)
        if status:
            raise RunnerError(f"memory of another device cannot be opened: {self.words(status)}")
        return found.value

    def close_shared(self, address: int) -> None:
        """Undo `open_shared`. Raises RunnerError."""
        status = self._entry("cuIpcCloseMemHandle", ctypes.c_uint64)(address)
        if status:
            raise RunnerError(f"memory of another device cannot be closed: {self.words(status)}")

    def call(self, name: str, kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> int:
        """Call an entry point with arguments of these ctypes; returns its status. Raises RunnerError where this driver
        has none of this name."""
        if not hasattr(self._library, name):
            raise RunnerError(f"this driver has no {name}")
        return int(self._entry(name, *kinds)(*arguments))

    def _entry(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
        return function

    def words(self, status: int) -> str:
        """The driver's name of an error."""
        name = self._entry("cuGetErrorName", ctypes.c_int, ctypes.c_void_p)
        found = ctypes.c_char_p()
        if name(status, ctypes.addressof(found)) or found.value is None:
            return f"error {status}"
        return f"{found.value.decode()} ({status})"


class RegisteredHost:
    """A host arena's own pages, pinned and mapped for the device; nothing is copied.

    Making it takes about 0.45 s for 1 GB of fresh pages: for start-up only. Keeps the mapping until `close`.

    Attributes:
        addresses: uint64 [num_blocks], the address on the device of each host block's KV.
        same: whether these are the host's own addresses, so that a kernel may be given host tensors (for benchmarks).
    """

    def __init__(self, driver: Driver, host: HostArena, piece_nbytes: int = PIECE_NBYTES) -> None:
        self._driver = driver
        # keeps the mapping: pages must stay while they are registered
        self._pages: NDArray[np.uint8] = np.frombuffer(host.region.map, np.uint8)
        self._pieces: list[int] = []
        base = _address(self._pages)
        offset = _address(host.kv) - base
        blocks = np.arange(host.num_blocks, dtype=np.uint64)
        own = np.uint64(base + offset) + blocks * np.uint64(host.stride_nbytes)
        self.addresses = own.copy()
        # cut between blocks: a copy that touches two registrations is an error
        step = max(1, piece_nbytes // host.stride_nbytes)
        try:
            for first in range(0, host.num_blocks, step):
                count = min(step, host.num_blocks - first)
                start = base + first * host.stride_nbytes
                seen = driver.register(start, count * host.stride_nbytes)
                self._pieces.append(start)
                known = np.uint64(seen + offset) + blocks[:count] * np.uint64(host.stride_nbytes)
                self.addresses[first : first + count] = known
        except BaseException:
            self.close()
            raise
        self.same = bool((self.addresses == own).all())

    def keep_for_good(self) -> None:
        """Never unregister or unmap the pages: a device that failed may still write to them."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pages))

    def close(self) -> None:
        """Unregister; idempotent. No copy may be in flight. Raises RunnerError after trying every piece."""
        problems = []
        for start in self._pieces:
            try:
                self._driver.unregister(start)
            except RunnerError as error:
                problems.append(error)
        self._pieces = []
        self._pages = np.empty(0, np.uint8)
        if problems:
            raise problems[0]
