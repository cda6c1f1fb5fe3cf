"""Sums are added up as one tree of neighbours, and are the same bits on every rank."""

from __future__ import annotations

import os

import pytest
import torch
from fdasync_transformers.parallel.collectives import HostCollectives
from ranks import as_ranks, returned

from fdasync.errors import InvariantBroken
from fdasync.ipc.exchange import Exchange, Meeting


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    # more than a slot, and not contiguous
    return (torch.randn(50, 31, generator=generator, dtype=torch.float64) * 10 ** (3 * rank)).to(dtype).t()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_sum_is_a_tree_of_the_ranks(dtype: torch.dtype, ranks: int) -> None:
    def work(exchange: Exchange) -> bytes:
        total = HostCollectives(exchange).all_reduce(given(exchange.rank, dtype), "a sum")
        return total.contiguous().view(torch.uint8).numpy().tobytes()

    found = returned(as_ranks(ranks, work, slot_nbytes=1000))
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    parts = [given(rank, dtype).to(wide) for rank in range(ranks)]
    want = (parts[0] + parts[1]) + (parts[2] + parts[3] if ranks == 4 else parts[2])
    assert found == [want.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()] * ranks
    others = (parts[1] + parts[2]) + (parts[3] + parts[0] if ranks == 4 else parts[0])
    assert wide is not dtype or not torch.equal(want, others)


def test_tensors_and_messages_come_in_the_order_of_ranks() -> None:
    def work(exchange: Exchange) -> tuple[list[list[float]], list[bytes]]:
        collectives = HostCollectives(exchange)
        parts = collectives.gather(torch.full((3, 200), float(exchange.rank)), "parts")
        return [part.unique().tolist() for part in parts], collectives.tell(bytes([exchange.rank]) * 2, "words")

    assert returned(as_ranks(2, work, slot_nbytes=512)) == [([[0.0], [1.0]], [b"\0\0", b"\1\1"])] * 2


def test_tensors_of_other_sizes_are_no_sum() -> None:
    def work(exchange: Exchange) -> None:
        HostCollectives(exchange).all_reduce(torch.zeros(2 + exchange.rank), "a sum")

    said = [str(error) for error in as_ranks(2, work)]
    assert said == [
        "12 bytes of a sum from one rank, 8 from another",
        "8 bytes of a sum from one rank, 12 from another",
    ]


def test_tensors_of_another_device_are_refused() -> None:
    meeting = Meeting(2)
    exchange = Exchange(0, 2, [os.dup(fd) for fd in meeting.fds(0)], deadline_s=1)
    with pytest.raises(InvariantBroken, match="a sum of tensors on meta"):
        HostCollectives(exchange).all_reduce(torch.zeros(1, device="meta"), "a sum")
    exchange.close()
    meeting.close()
