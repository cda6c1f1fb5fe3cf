"""Messages of the devices of a group, and digests of rows. In the interpreter the devices take turns."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
from fdasync_kernels.collectives.gather import gather
from fdasync_kernels.collectives.peer_memory import Group, PeerMemory
from fdasync_kernels.digest import PARTS, digest_rows
from fdasync_kernels.step_kernels import StepKernels
from step_kernels_here import both

from fdasync.errors import BadInput

CPU = torch.device("cpu")

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")


@needs_interpreter
@pytest.mark.parametrize(("ranks", "count"), [(2, 3), (3, 40), (4, 1500)])
def test_every_rank_has_the_messages_of_all_in_order(ranks: int, count: int) -> None:
    group = Group(ranks, 1)
    memory = [torch.full((group.nbytes(),), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
    peers = [PeerMemory(rank, [one.data_ptr() for one in memory], CPU, group) for rank in range(ranks)]
    # more calls than a channel has turns; -1 has the bits of an empty slot
    for call in range(4):
        given = [torch.arange(count, dtype=torch.int32) * 7_000_001 - call + rank for rank in range(ranks)]
        given[0][:2] = torch.tensor([-1, 0xFFFF])
        turns = int(peers[0].areas["message"].turns)
        # nobody waits: a first round fills the slots
        for _ in range(2):
            for peer in peers:
                peer.areas["message"].turns.fill_(turns)
            told = [gather(x, peer) for x, peer in zip(given, peers, strict=True)]
        assert all(torch.equal(each, torch.stack(given)) for each in told)


def test_messages_that_cannot_be_gathered_are_refused() -> None:
    peer = PeerMemory(0, [0], CPU, Group(1, 1))
    for bad, problem in (
        (torch.zeros(4), "float32"),
        (torch.zeros(8, dtype=torch.int32)[::2], "contiguous"),
    ):
        with pytest.raises(BadInput, match=problem):
            gather(bad, peer)


def digest_of(rows: torch.Tensor | None, salt: int = 0, *, kernels: StepKernels | None = None) -> list[int]:
    out = torch.empty(PARTS, dtype=torch.int32, device=None if rows is None else rows.device)
    (kernels or StepKernels()).digest_rows(rows, out, salt)
    return list(out.tolist())


@pytest.mark.ci
@needs_interpreter
@both
def test_digests_differ_where_a_byte_does(kernels: StepKernels) -> None:
    digest = partial(digest_of, kernels=kernels)
    rows = torch.arange(300 * 48 * 8).view(300, 48, 8).to(torch.uint8)
    assert digest(rows) == digest(rows.clone())
    assert digest(rows) != digest(rows, 1)
    assert digest(rows[:299]) != digest(rows)
    # zeros count by their number
    assert digest(torch.zeros(5, dtype=torch.uint8)) != digest(torch.zeros(6, dtype=torch.uint8))
    assert digest(None, 3) == digest(torch.zeros(0), 3) != digest(None, 4)
    # two ids of a token change places; one id is another
    for at in ((0, 0, 0), (150, 20, 3), (299, 47, 6)):
        token, layer, slot = at
        other = rows.clone()
        other[token, layer, slot], other[token, layer, slot + 1] = rows[token, layer, slot + 1], rows[at]
        assert digest(other) != digest(rows)
        one = rows.clone()
        one[at] += 1
        assert digest(one) != digest(rows)


def test_rows_that_have_no_digest_are_refused() -> None:
    with pytest.raises(BadInput, match="strides"):
        digest_of(torch.zeros(4, 4).t())
    # offsets behind the last tile would have more than 31 bits
    for nbytes in ((1 << 31) - 65536, (1 << 31) - 1, 1 << 31):
        with pytest.raises(BadInput, match=r"limit: 2147418111\)"):
            digest_rows(torch.empty(nbytes, dtype=torch.uint8, device="meta"), torch.zeros(PARTS, dtype=torch.int32), 0)
    with pytest.raises(BadInput, match=f"contiguous int32 .{PARTS}."):
        digest_rows(None, torch.zeros(3, dtype=torch.int32), 0)
