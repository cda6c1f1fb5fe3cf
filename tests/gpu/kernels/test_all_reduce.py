"""Sums over the devices of a group: the same bits on each, in the order of ranks, by either way.

In the interpreter the devices take turns and nobody waits: a first round fills the buffers. On GPUs each rank is a
process; several may share a device, which then gives each a while at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import triton

from fdasync.errors import BadInput
from fdasync.gpu.kernels.collectives.all_reduce import all_reduce
from fdasync.gpu.kernels.collectives.peer_memory import PROGRAMS, PeerMemory
from fdasync.ipc.exchange import Meeting
from tests.support.peers_child import inputs, wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
BUFFER_NBYTES = 1 << 15

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")


def group(ranks: int) -> tuple[Sequence[PeerMemory], list[torch.Tensor]]:
    memory = [torch.zeros(2 * BUFFER_NBYTES + 4 * PROGRAMS * ranks, dtype=torch.uint8) for _ in range(ranks)]
    addresses = [tensor.data_ptr() for tensor in memory]
    return [PeerMemory(rank, addresses, BUFFER_NBYTES, CPU) for rank in range(ranks)], memory


@needs_interpreter
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (2, 5000), (4, 24), (4, 8192)])
def test_every_rank_has_the_sum_in_the_order_of_ranks(
    ranks: int, count: int, dtype: torch.dtype, way: Literal["one_shot", "two_shot"]
) -> None:
    peers, _memory = group(ranks)
    given = inputs(ranks, count, dtype, seed=count)
    before = [x.clone() for x in given]
    sums: list[torch.Tensor] = []
    # two shots wait twice: the third round reads sums that the second one wrote
    for _ in range(3):
        sums = [all_reduce(x, peer, way=way) for x, peer in zip(given, peers, strict=True)]
        for peer in peers:
            peer.next_buffers()
    assert all(torch.equal(total, wanted(given)) for total in sums)
    assert all(torch.equal(x, was) for x, was in zip(given, before, strict=True))
    # the order of ranks shows: another one has other bits
    assert dtype is torch.bfloat16 or ranks == 2 or not torch.equal(wanted(given[::-1]), sums[0])


@needs_interpreter
def test_two_buffers_are_used_in_turn_and_the_result_may_take_the_place_of_the_input() -> None:
    peers, memory = group(2)
    x = torch.full((16,), 3.0)
    all_reduce(torch.full((16,), 5.0), peers[1], way="one_shot")
    total = all_reduce(x, peers[0], out=x, way="one_shot")
    assert total is x
    assert x.tolist() == [8.0] * 16
    all_reduce(torch.full((16,), 7.0), peers[0], way="one_shot")
    own = memory[0].view(torch.float32)
    halves = own[:16].tolist(), own[BUFFER_NBYTES // 4 : BUFFER_NBYTES // 4 + 16].tolist()
    assert sorted(halves) == [[3.0] * 16, [7.0] * 16]


def test_what_cannot_be_summed_is_refused() -> None:
    (one, _), _memory = group(2)
    for bad, problem in (
        (torch.zeros(16, dtype=torch.float64), "float64"),
        (torch.zeros(4, 16).t(), "strides"),
        (torch.zeros(17)[1:], "contiguous and aligned"),
        (torch.zeros(12), "12 elements"),
        (torch.zeros(BUFFER_NBYTES), "32768 bytes in all"),
    ):
        with pytest.raises(BadInput, match=problem):
            all_reduce(bad, one)
    with pytest.raises(BadInput, match="for a sum of"):
        all_reduce(torch.zeros(16), one, out=torch.zeros(8))
    assert all_reduce(torch.zeros(0), one).numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_sum_over_gpus(ranks: int) -> None:
    meeting = Meeting(ranks)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.peers_child", str(rank), str(ranks), *map(str, meeting.fds(rank))],
            pass_fds=meeting.fds(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(ranks)
    ]
    try:
        for child in children:
            said, _ = child.communicate(timeout=120)
            assert child.returncode == 0, said
    finally:
        for child in children:
            child.kill()
            child.communicate()
        meeting.close()
