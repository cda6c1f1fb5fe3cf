"""What the ranks of a group gather by NCCL, where their GPUs have no access to each other's memory.

Bound to NCCL's C functions, of the library that torch has loaded: torch's own process groups bring threads that watch
streams, which a group does not need, since its engine watches the processes. Gathering moves bytes and adds up nothing,
so the bits of a sum are its caller's. Knows no models. Made by runners that are ranks of a group.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import DeviceFailed, InvariantBroken, RunnerError

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange

_ID_NBYTES = 128
# ncclUint8
_BYTES = 1


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_NBYTES),)


class NcclGroup:
    """A communicator of NCCL over the ranks of an exchange, each with a GPU of its own.

    Args:
        exchange: the caller's; it tells rank 0's identifier to the others.
        device: this rank's; it is current.
        library: of NCCL; None: the library that torch has loaded.

    Blocks until all ranks have joined, and for ever if one does not: whoever watches the processes ends them then. The
    communicator is the process's until it ends: NCCL lets go of one only behind all graphs that gather by it.

    Attributes:
        ranks: of the group.

    Raises RunnerError where there is no NCCL, or it cannot connect the GPUs.
    """

    def __init__(self, exchange: Exchange, device: torch.device, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libnccl.so.2") if library is None else library
        except OSError as error:
            raise RunnerError(f"NCCL cannot be loaded: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self.ranks = exchange.ranks
        self._device = device
        self._comm = ctypes.c_void_p()
        self._gather = self._library.ncclAllGather
        pointer = ctypes.c_void_p
        self._gather.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer, pointer)
        own = _Id()
        if not exchange.rank:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)), "an identifier of a group cannot be had")
        told = bytes(exchange.gather(b"" if exchange.rank else bytes(own), "NCCL's identifier")[0])
        if len(told) != _ID_NBYTES:
            raise RunnerError(f"rank 0 gave {len(told)} bytes for an identifier of NCCL, which has {_ID_NBYTES}")
        init = self._library.ncclCommInitRank
        init.argtypes = (pointer, ctypes.c_int, _Id, ctypes.c_int)
        # blocking: at start-up
        status = init(ctypes.byref(self._comm), exchange.ranks, _Id.from_buffer_copy(told), exchange.rank)
        self._check(status, f"rank {exchange.rank} of {exchange.ranks} cannot join")

    def all_gather(self, own: torch.Tensor, into: torch.Tensor) -> None:
        """Queue on the current stream: `into` [ranks, *] becomes what the ranks have in `own` [*], in their order.

        Both are contiguous, on this rank's device, of one dtype, the caller's until the stream is past them. May be
        captured in a graph. All ranks make the same calls in the same order. Raises DeviceFailed where it cannot be
        queued.
        """
        if into.shape != (self.ranks, *own.shape) or own.dtype != into.dtype:
            raise InvariantBroken(f"{list(own.shape)} of {self.ranks} ranks gathered into {list(into.shape)}")
        if not own.is_contiguous() or not into.is_contiguous() or own.device != self._device:
            raise InvariantBroken(f"a tensor on {own.device} with strides {own.stride()} gathered on {self._device}")
        nbytes = own.numel() * own.element_size()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        status = self._gather(own.data_ptr(), into.data_ptr(), nbytes, _BYTES, self._comm, stream)
        if status:
            raise DeviceFailed(f"gathering {nbytes} bytes of each rank by NCCL: {self._words(status)}")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RunnerError(f"NCCL: {what}: {self._words(status)}")

    def _words(self, status: int) -> str:
        said: bytes = self._library.ncclGetErrorString(status)
        return said.decode(errors="replace")
