"""The trainer of the chaos harness: rank 0 of a group, which broadcasts weights, and can stop half-way to be killed.

    python -m tests.nightly.chaos.trainer

One JSON line in, one out. {"do": "open", "world": N} makes a store, and tells the group; "join" meets the others;
{"do": "send", "number": N} broadcasts tensors of that number; with {"until": K, "dies": true} it says "stopped" when K
of them have arrived, begins with the next one and dies by SIGKILL at once, or with false does nothing any more, however
long it lives. Started by `trainers.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from fdasync_transformers import WeightsSender

from fdasync.errors import FdasyncError
from tests.nightly.chaos.runner import METAS, PART_WORDS

if TYPE_CHECKING:
    from fdasync_transformers.weights.groups.group import JoinedGroup

# a router lets hand-offs finish before its instances listen; longer than they wait
_TIMEOUT_S = 15.0


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def send_some(group: JoinedGroup, tensors: dict[str, torch.Tensor], count: int, *, dies: bool) -> None:
    """Broadcast so many tensors, and begin with one more; then die, or do nothing any more."""
    for number, tensor in enumerate(tensors.values()):
        if number == count:
            break
        if group.is_full:
            group.wait()
        group.begin(tensor.view(torch.uint8))
    while group.is_busy:
        # they have arrived
        group.wait()
    say(done="stopped")
    group.begin(list(tensors.values())[count].view(torch.uint8))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def main() -> None:
    torch.set_num_threads(1)
    say(done="ready")
    sender: WeightsSender | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "open":
                sender = WeightsSender(
                    world_size=asked["world"], name=asked["name"], timeout_s=_TIMEOUT_S, bucket_nbytes=0, checksum=True
                )
                say(done="open", group=msgspec.to_builtins(sender.group))
                continue
            assert sender is not None
            if asked["do"] == "join":
                sender.join()
            elif asked["do"] == "send":
                tensors = {meta.name: torch.full((PART_WORDS,), asked["number"], dtype=torch.int64) for meta in METAS}
                if asked.get("until") is not None:
                    assert sender._joined is not None
                    send_some(sender._joined, tensors, asked["until"], dies=asked["dies"])
                sender.send(tensors)
            else:
                sender.close()
        except FdasyncError as error:
            say(error=f"{type(error).__name__}: {error}")
        else:
            say(done=asked["do"])


if __name__ == "__main__":
    main()
