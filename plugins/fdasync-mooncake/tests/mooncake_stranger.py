"""A process that has Mooncake's engine and no token: overwrites the memory that engines have registered, until it ends.

Run as `python mooncake_stranger.py NBYTES SEGMENT...`. It says "struck" when it has overwritten each once, or "not kept
out" if it could write behind what is registered.
"""

import ctypes
import mmap
import os
import sys


def main() -> None:
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    from mooncake.engine import TransferEngine

    nbytes, *segments = sys.argv[1:]
    count = int(nbytes)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = mmap.mmap(-1, count)
    memory[:] = b"\x5a" * count
    here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert engine.register_memory(here, count) == 0
    places = [(segment, engine.get_first_buffer_address(segment)) for segment in segments]
    assert all(there for _, there in places)
    for segment, there in places:
        if engine.transfer_sync_write(segment, here, there + count, 4096) == 0:
            print("not kept out", flush=True)
            return
    said = False
    # until its parent kills it
    while True:
        for segment, there in places:
            code = engine.transfer_sync_write(segment, here, there, count)
            assert code == 0, code
        if not said:
            print("struck", flush=True)
            said = True


if __name__ == "__main__":
    main()
