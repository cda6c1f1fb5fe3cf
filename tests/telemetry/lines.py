"""What tests of lines read them with."""

from __future__ import annotations

import contextlib
import os


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = bytearray()
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(fd, 1 << 16):
            data += piece
    return bytes(data)
