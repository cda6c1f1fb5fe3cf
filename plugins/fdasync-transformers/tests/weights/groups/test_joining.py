"""Joins end in time when another rank dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch.distributed as torch_dist
from fdasync_transformers import WeightsSender
from fdasync_transformers.weights.groups.group import JoinedGroup

from fdasync import WeightsGroup
from fdasync.errors import WeightsRejected
from fdasync.testing import until

if TYPE_CHECKING:
    from collections.abc import Iterator

dist: Any = torch_dist
_LIMIT_S = 30.0
# gloo's own limit is five times as long
_LATE_S = 4 * _LIMIT_S
_RANK = """
import sys, msgspec
from fdasync import WeightsGroup
from fdasync_transformers.weights.groups.group import JoinedGroup
JoinedGroup(msgspec.json.decode(sys.argv[1], type=WeightsGroup), "")
"""


def group_at(port: int, world_size: int, rank: int = 1) -> WeightsGroup:
    return WeightsGroup(name="w", address="127.0.0.1", port=port, world_size=world_size, rank=rank, timeout_s=_LIMIT_S)


@contextmanager
def child(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def refused(group: WeightsGroup) -> str:
    began = time.monotonic()
    with pytest.raises(WeightsRejected, match="could not meet the others") as caught:
        JoinedGroup(group, "")
    assert time.monotonic() - began < _LATE_S
    return caught.value.problem


@pytest.mark.ci
async def test_a_rank_that_dies_when_it_has_told_its_address() -> None:
    sender = WeightsSender(world_size=3, name="w", timeout_s=_LIMIT_S)
    keys: Any = sender.store
    for prefix in ("w", "w/", "cpu/"):
        keys = dist.PrefixStore(prefix, keys)
    lost = msgspec.structs.replace(group_at(sender.group.port, 3, rank=2), timeout_s=60.0)
    with child(_RANK, msgspec.json.encode(lost).decode()) as rank:
        await until(lambda: keys.check(["0/2"]), 300, 0.05)
        rank.kill()
        rank.wait()
    # threads: the trainer and the rank that is refused each block until they have met
    joins = threading.Thread(target=_join, args=(sender,))
    joins.start()
    refused(msgspec.structs.replace(sender.group, rank=1))
    joins.join()
    sender.close()


def _join(sender: WeightsSender) -> None:
    with pytest.raises(WeightsRejected):
        sender.join()
