"""Refuses passes in which sequences packed in one row would attend to each other.

The library's eager, sdpa and flex attention tell sequences apart by positions that restart, and read them only without
a 2-D mask and without a cache (also one that the pass makes itself); flash attention by bounds, or by such positions.
With other arguments the sequences attend to each other, and the library does not say so. Knows no rows and no routers.
Called by `batch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.model.families import decoder_of
from fdasync_transformers.model.refusals import refuse_recurrent

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_trainer.replay.layout import Spans

#: attention of `fixed_numerics`, which reads the sequences off positions and bounds itself
FIXED = "fdasync_fixed"
_BY_POSITIONS = ("eager", "sdpa", "flex_attention")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_WAY_OUT = "give position_ids that begin at 0 in each sequence, and no attention_mask; or use flash attention"


def refuse_mixing(kind: str, model: Any, arguments: Mapping[str, Any], spans: Spans) -> None:
    """Refuse a pass over several sequences in one row in which they would attend to each other.

    A mask that is not 2-D (4-D, or one per kind of layer) is the caller's own and is not checked.

    Raises:
        UnsupportedModel: recurrent state, or attention that would mix the sequences; with the reason and the way out.
    """
    refuse_recurrent(model)  # recurrent state would run on into the next sequence
    mask, attention = arguments.get("attention_mask"), str(model.config._attn_implementation)
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        return

    def refused(why: str) -> UnsupportedModel:
        return UnsupportedModel(kind, f"packed sequences would attend to each other: {why}; {_WAY_OUT}")

    bounds = all(arguments.get(name) is not None for name in _BOUNDS)
    if attention == FIXED:
        if bounds or _restart(arguments, spans):
            return
        raise refused("fixed numerics read sequences off positions or bounds")
    if mask is not None:
        raise refused("with a 2-D attention_mask the library does not look at positions")
    if "flash" in attention:
        if bounds or _restart(arguments, spans):
            return
        raise refused(f"flash attention takes all of {', '.join(_BOUNDS)}, or positions")
    if kind == "gpt_oss":
        raise UnsupportedModel(kind, "without flash attention, packed sequences attend to each other: pad them")
    if attention not in _BY_POSITIONS:
        raise refused(f"{attention} attention is not known to keep them apart")
    if not _restart(arguments, spans):
        raise refused(f"{attention} attention tells them apart by position_ids alone")
    if arguments.get("past_key_values") is not None or _makes_cache(model, arguments):
        why = "packed sequences would attend to each other: with a KV cache the library does not look at positions"
        raise UnsupportedModel(kind, f"{why}; give use_cache=False")


def _restart(arguments: Mapping[str, Any], spans: Spans) -> bool:
    """Whether the positions of each sequence count up from 0."""
    given = arguments.get("position_ids")
    if given is None:
        return False
    table = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if table.ndim != 2 or len(table) != 1:
        return False
    return all(
        np.array_equal(table[0, first : first + length], np.arange(length))
        for first, length in zip(spans.offsets, spans.lengths, strict=True)
    )


def _makes_cache(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the pass makes a KV cache of its own, as the library does by default."""
    wanted = arguments.get("use_cache")
    if wanted is None:
        wanted = getattr(model.config, "use_cache", True)
    # the decoder's checkpointing switches the cache off in training
    decoder = decoder_of(model)
    return bool(wanted) and not (getattr(decoder, "gradient_checkpointing", False) and decoder.training)
