"""Mooncake's own client without the plugin, in a process of its own on the same memory: the baseline of benchmarks.

It keeps no store contract, checks no keys and asks for no existing keys: one call of the client per verb, on addresses
made before. The process itself takes the time, so the way of the command there and back does not count. Called by
benchmarks.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from fdasync.ipc.child import die_with_parent
from fdasync.ipc.shared_memory import SharedRegion
from fdasync_mooncake.client import import_client

if TYPE_CHECKING:
    from collections.abc import Sequence


class DirectProcess:
    """The process: starts when it is made, ends with `with`. One verb at a time; each returns its seconds. Blocks.

    Args:
        master: address, HOST:PORT.
        region: memory of the objects; owned by the caller.
        parts: of each object, as (offset, nbytes) in the region; the object's number is its place in the list.
        segment_nbytes: memory that the process lends to the pool.
        checksum: take XXH3 of all parts before a put and after a get, as the store's process does for block objects.
    """

    def __init__(
        self,
        master: str,
        region: SharedRegion,
        parts: Sequence[Sequence[tuple[int, int]]],
        *,
        segment_nbytes: int = 0,
        checksum: bool = False,
    ) -> None:
        settings = {
            "master": master,
            "fd": region.fd,
            "nbytes": region.nbytes,
            "parts": parts,
            "segment_nbytes": segment_nbytes,
            "checksum": checksum,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fdasync_mooncake.direct"],
            pass_fds=[region.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask(settings)

    def put(self, tag: str) -> float:
        """Put every object under keys of this tag. Raises RuntimeError if a put failed."""
        return self._ask({"verb": "put", "tag": tag})

    def get(self, tag: str) -> float:
        """Get every object back into its parts. Raises RuntimeError if a get failed."""
        return self._ask({"verb": "get", "tag": tag})

    def delete(self, tag: str) -> float:
        """Delete the objects of this tag."""
        return self._ask({"verb": "delete", "tag": tag})

    def close(self) -> None:
        """Kill and reap; idempotent."""
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> DirectProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the direct client ended with status {self._process.returncode}")
        answer = json.loads(line)
        if answer["problem"]:
            self.close()
            raise RuntimeError(answer["problem"])
        return float(answer["seconds"])


def main() -> None:
    """The process: one JSON object per line in and out."""
    die_with_parent()
    settings = json.loads(sys.stdin.readline())
    region = SharedRegion(settings["fd"], settings["nbytes"])
    base = ctypes.addressof(ctypes.c_char.from_buffer(region.map))
    store = import_client().MooncakeDistributedStore()
    host = settings["master"].rpartition(":")[0]
    code = store.setup(host, "P2PHANDSHAKE", settings["segment_nbytes"], 0, "tcp", "", settings["master"])
    code = code or store.register_buffer(base, region.nbytes)
    _answer(0.0, [code], [0])
    addresses = [[base + offset for offset, _ in parts] for parts in settings["parts"]]
    sizes = [[nbytes for _, nbytes in parts] for parts in settings["parts"]]
    totals = [sum(each) for each in sizes]
    for line in sys.stdin:
        message = json.loads(line)
        keys = [f"direct/{message['tag']}/{number}" for number in range(len(totals))]
        started = time.perf_counter()
        if message["verb"] == "put":
            _checksums(region, settings)
            _answer(started, store.batch_put_from_multi_buffers(keys, addresses, sizes), [0] * len(keys))
        elif message["verb"] == "get":
            codes = store.batch_get_into_multi_buffers(keys, addresses, sizes)
            _checksums(region, settings)
            _answer(started, codes, totals)
        else:
            _answer(started, store.batch_remove(keys, True), [0] * len(keys))


def _checksums(region: SharedRegion, settings: dict[str, Any]) -> None:
    if settings["checksum"]:
        import xxhash

        for parts in settings["parts"]:
            for offset, nbytes in parts:
                xxhash.xxh3_64_intdigest(region.view(offset, nbytes))


def _answer(started: float, codes: list[int], wanted: list[int]) -> None:
    seconds = time.perf_counter() - started
    problem = "" if codes == wanted else f"the client said {sorted(set(codes))}"
    print(json.dumps({"seconds": seconds, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
