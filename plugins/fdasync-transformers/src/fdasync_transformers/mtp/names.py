"""Names of the tensors of multi-token prediction (MTP) layers, as checkpoints store them and as the model has them.

Checkpoints number the layers on behind the model's own (`model.layers.61.eh_proj.weight` of 61 layers), or keep them
apart (`mtp.fc.weight`, `mtp.layers.0...`). In the model they stand under `mtp.layers.0.`, the decoder layer inside as
`mtp_block`, as in the library's `MtpLayer`. Knows names alone. Used by `weights/names.py` and `mtp/head.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

#: the layers' place in a served model
PREFIX = "mtp."
# config keys of families, for the number of MTP layers
_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers")
_NUMBERED = re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$")
_APART = re.compile(r"^mtp\.layers\.(\d+)\.(.+)$")
# parts beside the decoder layer, as they are stored and as the library calls them
_PARTS = (
    ("enorm.", "enorm."),
    ("hnorm.", "hnorm."),
    ("eh_proj.", "eh_proj."),
    ("shared_head.norm.", "post_norm."),
    ("post_norm.", "post_norm."),
    ("mtp_block.", "mtp_block."),
)
_OF_ONE_LAYER = (
    ("mtp.fc.", "mtp.layers.0.eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "mtp.layers.0.enorm."),
    ("mtp.pre_fc_norm_hidden.", "mtp.layers.0.hnorm."),
    ("mtp.norm.", "mtp.layers.0.post_norm."),
)
# copies of the model's own embedding and head
_COPIES = ("embed_tokens.", "shared_head.head.")


def told_layers(config: Any) -> int:
    """The number of MTP layers by a model's config, which may be more than its checkpoint has."""
    return max((int(getattr(config, key, 0) or 0) for key in _COUNTS), default=0)


def own_name(key: str, hidden_layers: int) -> str:
    """The model's name of an MTP layer's stored tensor, before the family's own conversions; other names as they are.

    Args:
        hidden_layers: how many layers the model has without them.
    """
    for stored, own in _OF_ONE_LAYER:
        if key.startswith(stored):
            return own + key.removeprefix(stored)
    layer, rest = _split(key, hidden_layers)
    if layer < 0:
        return key
    for stored, own in _PARTS:
        if rest.startswith(stored):
            return f"{PREFIX}layers.{layer}.{own}{rest.removeprefix(stored)}"
    return f"{PREFIX}layers.{layer}.mtp_block.{rest}"


def is_of_mtp(key: str, hidden_layers: int) -> bool:
    """Whether a stored name is of an MTP layer."""
    return key.startswith(PREFIX) or _split(key, hidden_layers)[0] >= 0


def is_copy(key: str, hidden_layers: int) -> bool:
    """Whether a stored name is of an MTP layer's copy of the model's embedding or head, which nothing reads."""
    layer, rest = _split(key, hidden_layers)
    return layer >= 0 and rest.startswith(_COPIES)


def stored_layers(keys: Iterable[str], hidden_layers: int) -> int:
    """How many MTP layers a checkpoint of these names has."""
    found = {_split(own_name(key, hidden_layers), hidden_layers)[0] for key in keys if is_of_mtp(key, hidden_layers)}
    return max(found, default=-1) + 1


def _split(key: str, hidden_layers: int) -> tuple[int, str]:
    """The MTP layer, from 0, and the rest of a name; -1: it is of none."""
    if found := _APART.match(key):
        return int(found.group(1)), found.group(2)
    found = _NUMBERED.match(key)
    if found is None or int(found.group(1)) < hidden_layers:
        return -1, key
    return int(found.group(1)) - hidden_layers, found.group(2)
