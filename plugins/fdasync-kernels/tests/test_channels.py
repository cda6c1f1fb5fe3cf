"""What stands in the slots of channels between launches, of every way: what was sent in this turn, nothing of the turn
before, and never what marks an empty slot. In the interpreter nobody waits, so sums alone would not show it."""

from __future__ import annotations

import pytest
import torch
import triton
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.gather import gather
from fdasync_kernels.collectives.peer_memory import TURNS, Group, PeerMemory, row_width
from fdasync_kernels.layer.finish import add_norm

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")

# elements of a sum: one program's; of a row
SIZE = 64


def send(way: str, peers: PeerMemory, x: torch.Tensor) -> None:
    if way == "message":
        gather(x.view(torch.int32).clone(), peers)
    elif way == "rows":
        add_norm(x[None], torch.zeros_like(x)[None], None, peers=peers)
    elif way == "one_shot":
        all_reduce(x, peers, way="one_shot")
    else:
        all_reduce(x, peers, way="two_shot")


class Channels:
    """A group, and the slots of the first channel of a way."""

    def __init__(self, ranks: int, way: str) -> None:
        group = Group(ranks, 1, row_width(SIZE) * 2)
        self.memory = [torch.full((group.nbytes(),), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
        addresses = [one.data_ptr() for one in self.memory]
        self.peers = [PeerMemory(rank, addresses, torch.device("cpu"), group) for rank in range(ranks)]
        self.ranks, self.area = ranks, self.peers[0].areas[way]
        self.first = int(self.area.addresses[0]) - addresses[0]

    def slots(self, rank: int, turn: int) -> list[torch.Tensor]:
        """Of the other ranks, in the memory of a rank."""
        way = self.area.way
        count = way.slots * self.ranks
        at = self.first + turn % TURNS * count * way.tile_nbytes
        every = self.memory[rank][at : at + count * way.tile_nbytes].view(count, way.tile_nbytes)
        return [slot for number, slot in enumerate(every) if number % self.ranks != rank]


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("way", ["one_shot", "two_shot", "rows", "message"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_slots_of_the_turn_before_are_empty_and_those_of_this_one_are_not(ranks: int, way: str) -> None:
    channels = Channels(ranks, way)
    for turn in range(2 * TURNS):
        for rank, peers in enumerate(channels.peers):
            send(way, peers, torch.full((SIZE,), 1.0 + rank + turn, dtype=torch.bfloat16))
        for rank, peers in enumerate(channels.peers):
            assert all((slot != 0xFF).any() for slot in channels.slots(rank, turn)), (turn, rank)
            assert all((slot == 0xFF).all() for slot in channels.slots(rank, turn - 1)), (turn, rank)
            assert int(peers.areas[way].turns[0]) == (turn + 1) % TURNS


def _sent(slot: torch.Tensor, elements: int) -> torch.Tensor:
    return slot.view(torch.int16)[:elements]


@pytest.mark.parametrize(("way", "elements"), [("one_shot", SIZE), ("two_shot", SIZE // 2), ("rows", SIZE)])
def test_nothing_that_is_sent_looks_like_an_empty_slot(way: str, elements: int) -> None:
    channels = Channels(2, way)
    # a NaN of all bits: a peer would wait for it for ever
    nan = torch.full((SIZE,), -1, dtype=torch.int16).view(torch.bfloat16)
    for peers in channels.peers:
        send(way, peers, nan)
    for rank in range(2):
        for slot in channels.slots(rank, 0):
            sent = _sent(slot, elements)
            assert (sent != -1).all()
            assert sent.view(torch.bfloat16).isnan().all()


def test_halves_of_messages_never_look_like_an_empty_slot() -> None:
    channels = Channels(2, "message")
    for peers in channels.peers:
        gather(torch.full((8,), -1, dtype=torch.int32), peers)
    for rank in range(2):
        (slot,) = channels.slots(rank, 0)
        assert (slot.view(torch.int32)[:16] == 0xFFFF).all()
