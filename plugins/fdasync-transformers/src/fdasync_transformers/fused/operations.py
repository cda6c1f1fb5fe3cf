"""Replaces all that single kernels of ours compute as the library does: norms, rotary embeddings and their angles, and
the gates of dense layers.

Called at start-up, once a model's weights are in place and before anything else replaces forwards of its modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync_kernels.limits import FLOATS

from fdasync_transformers.fused.proofs import alone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.proofs import Agree


@dataclass(frozen=True)
class FusedOperations:
    """Operations of a model that were replaced.

    Attributes:
        norms, rotary, dense, angles: names of the modules.
        notes: for people: why others are the library's own, a note for each class.
    """

    norms: tuple[str, ...] = ()
    rotary: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    angles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fuse_operations(model: PreTrainedModel, agree: Agree = alone) -> FusedOperations:
    """Replace norms, rotary embeddings, their angles and the gates of dense layers by single kernels, in place.

    Each module's own forward is compared with ours first, and a module whose results differ keeps it. Runs a plain pass
    of three tokens, so attention must still be the library's own, and waits for the device: for start-up. A new weight
    in a module's parameter, or a new parameter in its place, is used from the next call on.

    Args:
        model: in inference, on one device, with its weights in their final dtype. A module with a forward on the
            instance keeps it.
        agree: what the ranks of a group make of a reason to keep what they hold parts of.

    Returns:
        What was replaced, and notes. Replaced modules raise RunnerError where a gradient is asked for. Where kernels do
        not run, nothing is replaced.
    """
    try:
        from fdasync_kernels.chip import runs_on
    except ModuleNotFoundError as error:
        return FusedOperations(
            notes=(f"norms, rotary embeddings and gates are the library's own: no module {error.name}",)
        )
    device, dtype = model.device, model.dtype
    if not runs_on(device):
        return FusedOperations(
            notes=(f"norms, rotary embeddings and gates are the library's own: no kernels on {device}",)
        )
    if dtype not in FLOATS:
        return FusedOperations(
            notes=(f"norms, rotary embeddings and gates are the library's own: no kernels for {dtype}",)
        )
    from fdasync_transformers.fused.angles import fuse_angles
    from fdasync_transformers.fused.dense import fuse_dense
    from fdasync_transformers.fused.norms import fuse_norms
    from fdasync_transformers.fused.rotary import fuse_rotary

    # the rotary embedding first: its pass shall see the library's modules alone
    rotary = fuse_rotary(model, device)
    angles = fuse_angles(model, dtype, device)
    norms = fuse_norms(model, dtype, device)
    dense = fuse_dense(model, dtype, device, agree)
    notes: list[str] = []
    for what, each in (("norm", norms), ("rotary embedding", rotary), ("gate", dense), ("table of angles", angles)):
        notes += [f"{what} of {kind} is the library's own: {reason}" for kind, reason in each.reasons.items()]
    return FusedOperations(
        tuple(norms.names), tuple(rotary.names), tuple(dense.names), tuple(angles.names), tuple(notes)
    )
