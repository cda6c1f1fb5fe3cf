"""Events for tests of completion ports."""

from __future__ import annotations

import ctypes


def wait_value():
    """`cuStreamWaitValue32(stream, address, value, flags)`; flags 0: the stream waits until the word is that large."""
    call = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return call
