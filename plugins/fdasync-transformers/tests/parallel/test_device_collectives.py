"""Sums of ranks on GPUs, but for the GPUs: what is summed.

The kernels are tested by `plugins/fdasync-kernels`; here a group of one rank sums in the memory of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
from fdasync_kernels.collectives import all_reduce as sums
from fdasync_transformers.parallel.device_collectives import DeviceCollectives
from ranks import as_ranks, returned

from fdasync.errors import InvariantBroken
from fdasync.gpu import peers

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange

CPU = torch.device("cpu")


class InHostMemory:
    """Stands for `OpenedPeers`, of one rank."""

    def __init__(self, _exchange: Exchange, _device: torch.device, nbytes: int) -> None:
        self._held = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        self.addresses = [self._held.data_ptr()]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="reads and writes memory of the CPU")
def test_sums_are_of_whole_vectors_and_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "OpenedPeers", InHostMemory)
    monkeypatch.setattr(peers, "fewest_multiprocessors", lambda _exchange, _device: 2)
    seen: list[int] = []
    plain: Any = sums.all_reduce
    monkeypatch.setattr(sums, "all_reduce", lambda x, *args, **kw: seen.append(x.numel()) or plain(x, *args, **kw))

    def work(exchange: Exchange) -> None:
        collectives = DeviceCollectives(exchange, CPU)
        # what is no multiple of eight is padded
        for shape, summed in (((8,), 8), ((3, 50), 152), ((3, 3), 16), ((0, 8), 0)):
            seen.clear()
            x = torch.randn(shape)
            assert torch.equal(collectives.all_reduce(x.clone(), "some"), x)
            assert seen == [summed]
        seen.clear()
        with collectives.apart():
            collectives.all_reduce(torch.ones(8), "some")
        assert not seen
        message = torch.arange(5, dtype=torch.int32)
        assert torch.equal(collectives.share(message, "end of step 1"), message[None])
        with pytest.raises(InvariantBroken, match="o_proj: a sum of tensors on meta over cpu"):
            collectives.all_reduce(torch.ones(8, device="meta"), "o_proj")

    returned(as_ranks(1, work))
