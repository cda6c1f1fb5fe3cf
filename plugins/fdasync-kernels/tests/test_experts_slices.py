"""Experts in slices have the bits of the experts over each part of their width: `experts/chain.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from experts_cases import (
    APART,
    BULK,
    INNER,
    MANY,
    PAIRED,
    SINGLE,
    SMALL,
    SWAPPED,
    Case,
    make,
    reference,
)  # fmt: skip
from fdasync_kernels.experts.chain import experts

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync_kernels.experts.tiles import Tiles


def of_slice(case: Case, slices: int, number: int) -> torch.Tensor:
    """What these experts are over one part of their width."""
    options = case.options
    width = INNER // slices
    part = slice(number * width, (number + 1) * width)
    if options.get("transposed"):
        up = case.up.unflatten(2, (2, INNER))[:, :, :, part].flatten(2, 3)
        down = case.down[:, part]
    else:
        up = case.up.unflatten(1, (2, INNER))[:, :, part].flatten(1, 2)
        down = case.down[:, :, part]
    return experts(case.hidden, case.ids, case.weights, up.contiguous(), down.contiguous(), **options)


@pytest.mark.ci
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "options"), [(3, {}), (20, {"padded": True}), (20, {"transposed": True})])
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_are_the_experts_over_parts_of_their_width(
    device: torch.device, tokens: int, options: dict[str, Any], slices: int, dtype: torch.dtype
) -> None:
    case = make(device, tokens, dtype, **options)
    parts = [of_slice(case, slices, number).float() for number in range(slices)]
    wanted = parts[0] + parts[1] if slices == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3])
    found = case.run(slices=slices)
    assert found.dtype is torch.float32
    if device.type == "cuda" or dtype is torch.bfloat16:
        assert torch.equal(found, wanted)
    else:
        # the interpreter's products are numpy's, whose last bits depend on a tile's shape on some processors
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert float((found.double().cpu() - reference(case).sum(1)).norm() / reference(case).sum(1).norm()) < 0.02


@pytest.mark.ci
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tiles", [SINGLE, PAIRED, SMALL, SWAPPED, APART, MANY, BULK])
def test_slices_are_the_same_by_all_tiles(device: torch.device, tiles: Tiles) -> None:
    case = make(device, 20)
    # a slice of 12 is no multiple of the depth of any, one of 16 would be
    wanted = case.run(slices=4)
    if tiles.down.tma:
        with pytest.raises(BadInput, match="16 at once"):
            case.run(slices=4, tiles=tiles)
        case.down, case.up = case.down[:, :, :32].contiguous(), case.up.unflatten(1, (2, INNER))[:, :, :32]
        case.up = case.up.flatten(1, 2).contiguous()
        wanted = case.run(slices=2)
        assert torch.allclose(case.run(slices=2, tiles=tiles), wanted, rtol=1e-5, atol=1e-5)
    else:
        assert torch.allclose(case.run(slices=4, tiles=tiles), wanted, rtol=1e-5, atol=1e-5)


def test_slices_that_there_are_none_of_are_refused(device: torch.device) -> None:
    for slices in (0, 3, 8):
        with pytest.raises(BadInput, match="slices"):
            make(device, 2).run(slices=slices)
    with pytest.raises(BadInput, match="have one slice"):
        make(device, 2, biased=True).run(slices=2)
    with pytest.raises(BadInput, match="have one slice"):
        make(device, 2).run(slices=2, parts=True)
