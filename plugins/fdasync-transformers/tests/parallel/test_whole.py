"""Whole tensors of the parts of all ranks, in bands; and problems that ranks agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fdasync_transformers.model.kept.forms import FP8
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.parallel import whole
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.cuts import Cut, Target
from fdasync_transformers.weights.kept.targets import KeptTarget
from fdasync_transformers.weights.mapping import destination
from fdasync_transformers.weights.placement import Placement
from ranks import as_ranks, returned

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("shape", "dim", "count", "pieces"), [((24, 3), 0, 4, 2), ((24, 3), 0, 2, 1), ((5, 16), 1, 4, 2), ((48,), 0, 4, 1)]
)
def test_a_whole_tensor_is_gathered_in_bands(
    shape: tuple[int, ...], dim: int, count: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two rows, or less
    monkeypatch.setattr(whole, "_BAND_NBYTES", 24)
    given = torch.arange(torch.tensor(shape).prod(), dtype=torch.float32).view(shape)

    def work(exchange: Exchange) -> tuple[torch.Tensor, list[int]]:
        collectives = HostCollectives(exchange)
        cut = Cut(dim, count, exchange.rank * count // 4, pieces)
        part = torch.empty(cut.shape(shape))
        Target(part, shape, cut).put(0, given)
        sizes = []
        gather = collectives.gather

        def watched(tensor: torch.Tensor, label: str) -> list[torch.Tensor]:
            sizes.append(tensor.nbytes)
            return gather(tensor, label)

        collectives.gather = watched  # type: ignore[method-assign]
        return whole.gathered(part, cut, collectives, "w"), sizes

    found = returned(as_ranks(4, work))
    assert torch.equal(found[0][0], given)
    for tensor, sizes in found[1:]:
        assert tensor.numel() == 0
        assert sizes == found[0][1]
        assert max(sizes) <= 24
        assert len(sizes) > 1


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((3, 512, 256), Cut(1, 2, 0, 2)),
        ((3, 128, 512), Cut(2, 4, 0)),
        ((512, 48), Cut(0, 4, 0)),
        ((40, 256), Cut(1, 2, 0)),
    ],
)
def test_what_stays_quantised_is_gathered_dequantised(
    shape: tuple[int, ...], cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_BAND_NBYTES", 100_000)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wanted = Kept.made_of(given, FP8)

    def work(exchange: Exchange) -> torch.Tensor:
        own = cut.of_rank(exchange.rank, 4)
        part = Kept.empty(FP8, own.shape(shape), "cpu")
        target = destination(Placement("w"), part, own)
        assert isinstance(target, KeptTarget)
        target.put(0, given)
        return whole.gathered(part, own, HostCollectives(exchange), "w")

    found = returned(as_ranks(4, work))
    assert torch.equal(found[0], wanted[0 : shape[0]])


@pytest.mark.parametrize(
    ("problems", "agreed"),
    [
        (("", ""), ""),
        (("no room", "no room"), "no room"),
        (("", "no room"), "rank 1 of 2: no room"),
        (("no file", "no room"), "rank 0 of 2: no file; rank 1 of 2: no room"),
        # longer than a slot: what there is room for
        (("\N{SNOWMAN}" * 3000, "\N{SNOWMAN}" * 3000), "\N{SNOWMAN}" * 1333 + "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_problem_of_all_ranks_is_no_rank_s_own(problems: tuple[str, str], agreed: str) -> None:
    def work(exchange: Exchange) -> str:
        return whole.agree(HostCollectives(exchange), problems[exchange.rank], "a check")

    assert returned(as_ranks(2, work, slot_nbytes=4096)) == [agreed] * 2
    assert whole.agree(None, problems[0], "a check") == problems[0]
