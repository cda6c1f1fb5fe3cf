"""Ranks of trainers' groups, each in a process of its own that is forked from one that has imported torch.

    python group_ranks.py FOLDER SOCKET

Each connection to the socket is a rank: one line of JSON in, one out; the rank ends with the connection. The tensors
are those of the folder's safetensors file, each a broadcast.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as torch_dist
from fdasync_transformers import WeightsSender
from fdasync_transformers.weights.groups.group import JoinedGroup, new_store
from safetensors.torch import load_file

from fdasync import WeightsGroup

dist: Any = torch_dist
NAME = "w"
# longest that it waits for others
_ALONE_S = 120.0


def die_when_told(store: Any, ranks: list[int]) -> None:
    """Die by SIGKILL as soon as all these ranks have told their addresses."""
    for prefix in (NAME, f"{NAME}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    until = time.monotonic() + _ALONE_S
    while time.monotonic() < until and not store.check([f"0/{rank}" for rank in ranks]):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """What a connection asks for, by the name of its method."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._sender: WeightsSender | None = None
        self._joined: JoinedGroup | None = None

    def open(self, world_size: int, timeout_s: float) -> Any:
        """A store; tells the group."""
        self._sender = WeightsSender(world_size=world_size, name=NAME, timeout_s=timeout_s, bucket_nbytes=0)
        return msgspec.to_builtins(self._sender.group)

    def watch(self, group: Any, ranks: list[int]) -> None:
        """See `die_when_told`; other calls go on."""
        own = new_store(group["address"], group["port"], group["world_size"], 30.0, is_trainer=False)
        # threads: joining blocks meanwhile
        threading.Thread(target=die_when_told, args=(own, ranks), daemon=True).start()

    def join(self, group: Any) -> None:
        store = None if self._sender is None else self._sender.store
        self._joined = JoinedGroup(msgspec.convert(group, WeightsGroup), "", store)

    def send(self, first: int, count: int, *, dies: bool = False) -> None:
        """Broadcast so many tensors; then die, in the middle of the next one."""
        assert self._joined is not None
        tensors = list(self._tensors.values())
        for tensor in tensors[first : first + count]:
            self._joined.begin(tensor.view(-1).view(torch.uint8))
            self._joined.wait()
        if dies:
            self._joined.begin(tensors[first + count].view(-1).view(torch.uint8))
            os.kill(os.getpid(), signal.SIGKILL)


def serve(connection: socket.socket, tensors: dict[str, torch.Tensor]) -> None:
    rank = Rank(tensors)
    with connection.makefile("rw") as lines:
        for line in lines:
            name, values = json.loads(line)
            try:
                said = getattr(rank, name)(**values)
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(said) + "\n")
            lines.flush()


def main() -> None:
    torch.set_num_threads(1)
    tensors = load_file(Path(sys.argv[1]) / "model.safetensors")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[2])
    server.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = server.accept()
        if not os.fork():
            server.close()
            with suppress(OSError):
                # the client is gone
                serve(connection, tensors)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
