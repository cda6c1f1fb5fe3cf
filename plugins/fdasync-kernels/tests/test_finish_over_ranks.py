"""Rows that are summed over ranks by the kernel that goes on from their sum. In the interpreter the devices take turns;
`tests/support/peers_child.py` does the same on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import triton
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.peer_memory import Group, PeerMemory, row_width
from fdasync_kernels.layer.finish import Norm, add_norm, finish_experts
from peers_child import Block, blocks

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")


def group(ranks: int, size: int, dtype: torch.dtype) -> tuple[list[PeerMemory], list[torch.Tensor]]:
    told = Group(ranks, 4, row_width(size) * dtype.itemsize)
    memory = [torch.full((told.nbytes(),), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
    addresses = [tensor.data_ptr() for tensor in memory]
    return [PeerMemory(rank, addresses, CPU, told) for rank in range(ranks)], memory


def in_turn(peers: list[PeerMemory], way: str, call: Callable[[PeerMemory], object]) -> list[object]:
    """What a call gives on each rank: nobody waits, so all make it again until all rows have come."""
    before = [peer.areas[way].turns.clone() for peer in peers]
    found: list[object] = []
    for _ in range(2):
        for peer, turns in zip(peers, before, strict=True):
            peer.areas[way].turns.copy_(turns)
        found = [call(peer) for peer in peers]
    return found


@pytest.mark.ci(after=1)
@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "rows", "size"), [(3, 2, 40), (2, 1, 256), (2, 5, 40), (4, 3, 264)])
def test_the_bits_are_those_of_a_sum_and_of_what_is_behind_it(
    ranks: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    peers, _memory = group(ranks, size, dtype)
    # more calls than a channel has turns
    for seed in range(4):
        given = blocks(ranks, rows, size, dtype, seed=seed)
        residual, norm = given[0].residual, given[0].norm

        def summed(peer: PeerMemory, given: list[Block] = given) -> torch.Tensor:
            return all_reduce(given[peer.rank].rows, peer)

        def finished(peer: PeerMemory, given: list[Block] = given) -> tuple[torch.Tensor, torch.Tensor]:
            one = given[peer.rank]
            return add_norm(one.rows, one.residual, one.norm, peers=peer)

        sums, found = in_turn(peers, "one_shot", summed), in_turn(peers, "rows", finished)
        for total, (hidden, normed) in zip(sums, found, strict=True):
            wanted = add_norm(total, residual, norm)
            assert torch.equal(hidden, wanted[0])
            assert torch.equal(normed, wanted[1])


@needs_interpreter
def test_what_is_summed_of_experts_is_the_sum_of_parts_and_shared_ones() -> None:
    peers, _memory = group(2, 48, torch.bfloat16)
    given = blocks(2, 3, 48, torch.bfloat16, seed=1)

    def finish(one: Block, peer: PeerMemory | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return finish_experts(one.parts, one.ids, one.num_experts, one.residual, one.norm, shared=one.rows, peers=peer)

    zeros = torch.zeros(3, 48, dtype=torch.bfloat16)
    alone = [finish_experts(one.parts, one.ids, one.num_experts, zeros, None, shared=one.rows)[0] for one in given]
    sums = in_turn(peers, "one_shot", lambda peer: all_reduce(alone[peer.rank], peer))
    found = in_turn(peers, "rows", lambda peer: finish(given[peer.rank], peer))
    for total, (hidden, normed) in zip(sums, found, strict=True):
        wanted = add_norm(total, given[0].residual, given[0].norm)
        assert torch.equal(hidden, wanted[0])
        assert torch.equal(normed, wanted[1])
    assert not torch.equal(finish(given[0], None)[0], found[0][0])


def test_rows_that_the_memory_does_not_take_are_refused() -> None:
    peers, _memory = group(2, 48, torch.bfloat16)
    norm = Norm(torch.ones(48, dtype=torch.bfloat16), 1e-5)
    assert peers[0].takes_rows(8, 512)
    for rows, dtype in ((9, torch.bfloat16), (3, torch.float32)):
        x = torch.zeros(rows, 48, dtype=dtype)
        with pytest.raises(BadInput, match=f"{rows} rows of 48 {dtype}, which they do not take"):
            add_norm(x, x, None, peers=peers[0])
    without = PeerMemory(0, [0, 0], CPU, Group(2, 4))
    with pytest.raises(BadInput, match="do not take"):
        add_norm(
            torch.zeros(3, 48, dtype=torch.bfloat16), torch.zeros(3, 48, dtype=torch.bfloat16), norm, peers=without
        )
