"""Makes linears that read the same input one product: their weights become views of one storage.

Names, shapes and parameters stay what they were, so weights are loaded and updated by name as before, and what is
written to a part is in the whole. Knows linears; knows no families. Called by `fuse.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from fdasync_kernels.experts.stored import BLOCK

from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.model.kept.forms import FP8
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.model.kept.linears import KeptLinear

if TYPE_CHECKING:
    from collections.abc import Sequence


class Merged(NamedTuple):
    """One linear in the place of several.

    Attributes:
        weight: [sum of their outputs, inputs]; a view of the storage that the parts' weights are views of. Of layers
            that are kept as stored, so are its values and scales.
        bias: likewise [sum of their outputs], or None.
    """

    weight: torch.Tensor | Kept
    bias: torch.Tensor | None


def merge_linears(linears: Sequence[torch.nn.Linear]) -> Merged:
    """Bind the weights (and biases) of linears to one storage, their values kept; raises Differs where that cannot be.

    The parameters stay the same objects with new addresses: call it before anything keeps their addresses (a graph).
    Until it returns, the memory of the parts is held twice. Linears that are merged already are left as they are.
    """
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    stored = all(isinstance(linear, KeptLinear) for linear in linears)
    biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
    kinds = {(type(linear), linear.weight.shape[1], linear.weight.dtype, linear.weight.device) for linear in linears}
    if len(kinds) > 1 or not (stored or type(linears[0]) is torch.nn.Linear):
        raise Differs("its projections are not alike")
    if stored and any(len(weight) % BLOCK for weight in weights[:-1]):
        raise Differs(f"its projections end within blocks of {BLOCK} rows that share a scale")
    given = [bias for bias in biases if bias is not None]
    if given and len(given) < len(biases):
        raise Differs("some of its projections have a bias, and some have none")
    return Merged(_bind_kept(linears) if stored else _bind(weights), _bind(given) if given else None)


def _bind_kept(linears: Sequence[torch.nn.Linear]) -> Kept:
    names = ("weight", "weight" + FP8.scales_end)
    values, scales = (_bind([linear.state_dict(keep_vars=True)[name] for linear in linears]) for name in names)
    return Kept(FP8, {"": values, FP8.scales_end: scales}, "")


# what an inference mode allocates could not be updated outside of one
@torch.inference_mode(False)
@torch.no_grad()
def _bind(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole of parameters that lie behind each other; copies them there first where they do not yet."""
    first = parts[0].detach()
    rows = sum(part.shape[0] for part in parts)
    place = first.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        place += part.nbytes
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    # by bytes where an element is one: torch joins no FP8
    narrow = first.element_size() == 1
    pieces = [part.detach().view(torch.uint8) if narrow else part.detach() for part in parts]
    whole = torch.cat(pieces).view(first.dtype)
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole
