"""Replaces all that single kernels of ours compute as the library does: norms, rotary embeddings and their angles, and
the gates of dense layers.

Called at start-up, once a model's weights are in place and before anything else replaces forwards of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_kernels.limits import FLOATS

from fdasync_transformers.fused.angles import Angles
from fdasync_transformers.fused.dense import Gates
from fdasync_transformers.fused.norms import Norms
from fdasync_transformers.fused.replacement import Replaced, alone, replace
from fdasync_transformers.fused.rotary import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.replacement import Agree, Operation

#: the rotary embedding first: its pass shall see the library's modules alone
OPERATIONS: tuple[type[Operation[Any]], ...] = (Rotary, Angles, Norms, Gates)


def fuse_operations(model: PreTrainedModel, agree: Agree = alone) -> dict[type[Operation[Any]], Replaced]:
    """Replace norms, rotary embeddings, their angles and the gates of dense layers by single kernels, in place.

    See `replace`. Runs a plain pass of three tokens, so attention must still be the library's own. A new weight in a
    module's parameter, or a new parameter in its place, is used from the next call on. A module with a forward on the
    instance keeps it. Gates are parts of what ranks of a group share, and all else is whole on each of them.
    """
    if model.dtype not in FLOATS:
        return {kind: Replaced(kind, reasons={"": f"no kernels for {model.dtype}"}) for kind in OPERATIONS}
    return {type(one): replace(one, model, agree if isinstance(one, Gates) else alone) for one in operations_of(model)}


def operations_of(model: PreTrainedModel) -> list[Operation[Any]]:
    """What may replace operations of a model; nothing of dtypes that kernels do not take."""
    return [kind(model.dtype, model.device) for kind in OPERATIONS] if model.dtype in FLOATS else []
