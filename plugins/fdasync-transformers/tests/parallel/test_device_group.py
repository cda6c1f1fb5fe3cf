"""How ranks reach each other's GPUs, but for the GPUs: who is refused, who sums by NCCL, and what such sums are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.parallel import device_collectives, device_group
from fdasync_transformers.parallel.device_group import join
from ranks import as_ranks, returned

from fdasync.errors import ConfigError
from fdasync.gpu import nccl
from fdasync.gpu.peers import OutOfReach

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange

CPU = torch.device("cpu")
ROW = torch.empty(16, device="meta")


class OverExchange:
    """Stands for `NcclGroup`: gathers through the host."""

    def __init__(self, exchange: Exchange, _device: torch.device) -> None:
        self._exchange = exchange

    def all_gather(self, own: torch.Tensor, into: torch.Tensor) -> None:
        data: Any = own.contiguous().view(-1).view(torch.uint8).numpy()
        parts = [bytearray(part) for part in self._exchange.gather(memoryview(data), "gathered")]
        for place, part in zip(into, parts, strict=True):
            place.copy_(torch.frombuffer(part, dtype=own.dtype).view(own.shape))


def as_gpus(monkeypatch: pytest.MonkeyPatch, exchange: Exchange, uuids: tuple[str, str], *, reaches: bool) -> None:
    """Let this rank's CPU stand for the GPU of its UUID; each process sees the GPUs a and b, or its own alone."""
    mine = uuids[exchange.rank]
    seen = ["a", "b"] if uuids[0] == "a" else [mine]
    fake = SimpleNamespace(
        device_count=lambda: len(seen),
        get_device_properties=lambda at: SimpleNamespace(uuid=mine if at == CPU else seen[at]),
        can_device_access_peer=lambda _own, _other: reaches,
    )
    monkeypatch.setattr(device_group.torch, "cuda", fake)
    monkeypatch.setattr(nccl, "NcclGroup", OverExchange)
    monkeypatch.setattr(device_collectives, "DeviceCollectives", lambda *_, **__: "in peers' memory")


@pytest.mark.parametrize(
    ("uuids", "way", "reaches", "problem"),
    [
        (("a", "a"), "auto", True, "tensor_parallel: 2 ranks have 1 GPUs: a"),
        (("a", "a"), "nccl", True, "tensor_parallel: 2 ranks have 1 GPUs: a"),
        (
            ("a", "b"),
            "peers",
            False,
            "runner_config.collectives: GPU a of rank 0 has no access to the memory of b; GPU b of rank 1",
        ),
    ],
)
def test_gpus_are_refused_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, str], way: Any, reaches: bool, problem: str
) -> None:
    def work(exchange: Exchange) -> str:
        as_gpus(monkeypatch, exchange, uuids, reaches=reaches)
        with pytest.raises(ConfigError) as caught:
            join(exchange, CPU, way, ROW)
        return str(caught.value)

    said = returned(as_ranks(2, work))
    assert said[0] == said[1]
    assert problem in said[0]


@pytest.mark.parametrize(
    ("uuids", "way", "reaches", "note"),
    [
        (("a", "b"), "auto", True, "sums in peers' memory"),
        # another process may not see the GPUs of the others: opening their memory tells
        (("c", "d"), "auto", False, "sums in peers' memory"),
        (("a", "b"), "nccl", True, "sums by NCCL: as asked for"),
        (("a", "b"), "auto", False, "sums by NCCL: GPU a of rank 0 has no access to the memory of b; GPU b of rank 1"),
    ],
)
def test_a_group_sums_in_memory_that_all_reach_and_else_by_nccl(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, str], way: Any, reaches: bool, note: str
) -> None:
    def work(exchange: Exchange) -> str:
        as_gpus(monkeypatch, exchange, uuids, reaches=reaches)
        made, said = join(exchange, CPU, way, ROW)
        assert (made == "in peers' memory") is ("NCCL" not in said)
        return said

    said = returned(as_ranks(2, work))
    assert said[0] == said[1]
    assert said[0].startswith(note)


@pytest.mark.parametrize("way", ["auto", "peers"])
def test_memory_that_cannot_be_opened_has_ranks_sum_by_nccl_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    # GPUs of other containers, or parts of GPUs: no rank sees another's, so the driver cannot be asked before
    def unopened(*_: Any, **__: Any) -> None:
        raise OutOfReach("rank 1: memory of another device cannot be opened: error 217")

    def work(exchange: Exchange) -> str:
        as_gpus(monkeypatch, exchange, ("c", "d"), reaches=False)
        monkeypatch.setattr(device_collectives, "DeviceCollectives", unopened)
        if way == "auto":
            return join(exchange, CPU, way, ROW)[1]
        with pytest.raises(ConfigError) as caught:
            join(exchange, CPU, way, ROW)
        assert caught.value.hint
        return str(caught.value)

    start = "sums by NCCL: " if way == "auto" else "runner_config.collectives: "
    for said in returned(as_ranks(2, work)):
        assert said.startswith(f"{start}rank 1: memory of another device cannot be opened: error 217")


def test_ranks_of_one_gpu_join_where_tests_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(exchange: Exchange) -> str:
        as_gpus(monkeypatch, exchange, ("a", "a"), reaches=True)
        return join(exchange, CPU, "auto", ROW, may_share=True)[1]

    assert returned(as_ranks(2, work)) == ["sums in peers' memory"] * 2


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_by_nccl_are_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    given = [torch.randn((5, 16), generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]

    def work(exchange: Exchange) -> tuple[list[Any], ...]:
        monkeypatch.setattr(nccl, "NcclGroup", OverExchange)
        fake = SimpleNamespace(get_device_properties=lambda _at: SimpleNamespace(uuid=f"of rank {exchange.rank}"))
        monkeypatch.setattr(device_group.torch, "cuda", fake)
        group, _ = join(exchange, CPU, "nccl", ROW)
        total = group.all_reduce(given[exchange.rank].clone(), "o_proj")
        # a tensor whose numbers do not follow each other
        turned = group.all_reduce(given[exchange.rank].clone().t(), "o_proj")
        assert torch.equal(turned, total.t())
        with group.apart():
            assert group.all_reduce(given[0], "o_proj") is given[0]
        assert group.peers(given[0]) is None
        message = torch.arange(3, dtype=torch.int32) + exchange.rank
        return total.float().tolist(), group.share(message, "end of step 1").tolist()

    parts = [part.float() for part in given]
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    for total, told in returned(as_ranks(4, work)):
        assert torch.equal(torch.tensor(total), wanted.to(dtype).float())
        assert told == [[rank, rank + 1, rank + 2] for rank in range(4)]
    # the order shows
    one_by_one = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert dtype is torch.bfloat16 or not torch.equal(one_by_one, wanted)
