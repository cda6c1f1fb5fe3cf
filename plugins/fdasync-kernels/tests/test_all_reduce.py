"""Sums over the devices of a group: the same bits on each, as one tree of neighbours, by either way.

In the interpreter the devices take turns and nobody waits: calls are made again until all has come. On GPUs each rank
is a process; several may share a device, which then gives each a while at a time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import triton
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.peer_memory import TURNS, Group, PeerMemory
from peers_child import inputs, wanted

from fdasync.errors import BadInput
from fdasync.ipc.exchange import Meeting

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")


def group(ranks: int, processors: int = 16) -> tuple[list[PeerMemory], list[torch.Tensor]]:
    told = Group(ranks, processors)
    memory = [torch.full((told.nbytes(),), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
    addresses = [tensor.data_ptr() for tensor in memory]
    return [PeerMemory(rank, addresses, CPU, told) for rank in range(ranks)], memory


def in_turn(
    given: Sequence[torch.Tensor], peers: Sequence[PeerMemory], way: Literal["one_shot", "two_shot", "auto"]
) -> list[torch.Tensor]:
    """The sums of one call on every rank. Nobody waits, so all make it again until all tiles have come: once, and once
    more for two shots, where a tile waits for others."""
    before = [{name: area.turns.clone() for name, area in peer.areas.items()} for peer in peers]
    sums: list[torch.Tensor] = []
    for _ in range(2 if way == "one_shot" else 3):
        for peer, turns in zip(peers, before, strict=True):
            for name, area in peer.areas.items():
                area.turns.copy_(turns[name])
        sums = [all_reduce(x, peer, way=way) for x, peer in zip(given, peers, strict=True)]
    return sums


SIZES = [(2, 8), (2, 1400), (3, 2000), (4, 24), (4, 2048), (7, 256), (8, 256)]
# each size by each way and, where time allows, in both dtypes
SUMS = [
    pytest.param(ranks, count, dtype, way, marks=[pytest.mark.nightly] if (number + turn + other) % 2 else [])
    for number, (ranks, count) in enumerate(SIZES)
    for turn, way in enumerate(("one_shot", "two_shot"))
    for other, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.ci(after=2)
@needs_interpreter
@pytest.mark.parametrize(("ranks", "count", "dtype", "way"), SUMS)
def test_every_rank_has_the_sum_as_a_tree_of_neighbours(
    ranks: int, count: int, dtype: torch.dtype, way: Literal["one_shot", "two_shot"]
) -> None:
    # four programs: the largest of these sums takes them all, a tile each
    peers, _memory = group(ranks, 4)
    # more calls than a channel has turns
    for seed in range(TURNS + 1):
        given = inputs(ranks, count, dtype, seed=count + seed)
        before = [x.clone() for x in given]
        sums = in_turn(given, peers, way)
        assert all(torch.equal(total, wanted(given)) for total in sums)
        assert all(torch.equal(x, was) for x, was in zip(given, before, strict=True))
        # the order shows: with other neighbours a sum has other bits, and so has one after the other of four
        assert dtype is torch.bfloat16 or ranks == 2 or not torch.equal(wanted([*given[1:], given[0]]), sums[0])
        assert dtype is torch.bfloat16 or ranks < 4 or not torch.equal(sum(given[1:], given[0]), sums[0])


@needs_interpreter
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_a_program_takes_several_tiles_where_a_sum_has_more_than_programs(way: Literal["one_shot", "two_shot"]) -> None:
    # four programs for sums of many bytes
    peers, _memory = group(2, 1)
    # of the wide way one program has two tiles, of which one is short; with three, calls could not be made again, since
    # a program empties what it has read
    each = 4 * 4096 + 40
    for count in (each if way == "one_shot" else 2 * each, 24):
        given = inputs(2, count, torch.bfloat16, seed=count)
        assert all(torch.equal(total, wanted(given)) for total in in_turn(given, peers, way))


@pytest.mark.ci
@needs_interpreter
def test_sums_of_any_sizes_and_dtypes_follow_each_other() -> None:
    """On the same channels: what a large sum leaves in a slot is no part of a small one behind it."""
    peers, _memory = group(2, 2)
    draw = random.Random(5)
    ways: tuple[Literal["one_shot", "two_shot", "auto"], ...] = ("one_shot", "two_shot", "auto")
    for seed in range(24):
        count = 8 * draw.choice((1, 3, 100, 500, 900))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        given = inputs(2, count, dtype, seed=seed)
        sums = in_turn(given, peers, draw.choice(ways))
        assert all(torch.equal(total, wanted(given)) for total in sums), (seed, count, dtype)


@needs_interpreter
def test_the_result_may_take_the_place_of_the_input() -> None:
    peers, _memory = group(2)
    x = torch.full((16,), 3.0)
    all_reduce(torch.full((16,), 5.0), peers[1], way="one_shot")
    total = all_reduce(x, peers[0], out=x, way="one_shot")
    assert total is x
    assert x.tolist() == [8.0] * 16


def test_what_cannot_be_summed_is_refused() -> None:
    (one, _), _memory = group(2)
    for bad, problem in (
        (torch.zeros(16, dtype=torch.float64), "float64"),
        (torch.zeros(4, 16).t(), "strides"),
        (torch.zeros(17)[1:], "contiguous and aligned"),
        (torch.zeros(12), "12 elements"),
    ):
        with pytest.raises(BadInput, match=problem):
            all_reduce(bad, one)
    with pytest.raises(BadInput, match="for a sum of"):
        all_reduce(torch.zeros(16), one, out=torch.zeros(8))
    assert all_reduce(torch.zeros(0), one).numel() == 0


@pytest.mark.ci
def test_all_programs_of_a_launch_run_at_once() -> None:
    """They wait for those of other devices. Compiled for Hopper without one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_ranks.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * (2 + 3)
    assert all(int(held) >= int(wanted) for _, _, held, wanted in lines), lines


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_sum_over_gpus(ranks: int) -> None:
    meeting = Meeting(ranks)
    children = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parent / "support/peers_child.py"),
                str(rank),
                str(ranks),
                *map(str, meeting.fds(rank)),
            ],
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
            said, _ = child.communicate(timeout=600)
            assert child.returncode == 0, said
    finally:
        for child in children:
            child.kill()
            child.communicate()
        meeting.close()
