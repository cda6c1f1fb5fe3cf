"""Rows as SGLang answers them, and slime and Miles take them: base64 of raw int32, all hidden layers.

Contract, read in slime 624b824a8 (`slime/utils/types.py`, `slime/utils/misc.py`,
`slime/observability/rollout_data_utils.py`) and in Miles of August 2026
(`miles/rollout/generate_utils/generate_endpoint_utils.py`, `miles/rollout/session/samples/merge.py`), which read
SGLang's `/generate` `meta_info["routed_experts"]`: C-order int32 [tokens - 1 - start, num_hidden_layers, top_k] without
a header, dense layers zero. Where `start` is not 0, slime reads it from `meta_info["routed_experts_start_len"]`, and
cuts the rows that it has at that position; Miles asks for a start in the request and takes patches that begin exactly
where the last patch ended. slime refuses a sample whose rows of some MoE layer are all zero where top_k > 1. Called by
users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput
from fdasync_trainer.rows.checks import RoutingLayout, check_count, check_num_rows, check_start, rows_of
from fdasync_trainer.rows.encoding import MAX_NBYTES, decode, encode
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from fdasync.result import Routing


def to_sglang(routing: Routing, num_hidden_layers: int) -> str:
    """The value of `meta_info["routed_experts"]`; put `routing.start` into `meta_info["routed_experts_start_len"]`.

    No rows give "". Raises BadInput as `expand_layers`.
    """
    check_count(num_hidden_layers, "num_hidden_layers", 1)
    return encode(expand_layers(routing, num_hidden_layers, "<i4"))


def from_sglang(
    text: str,
    layout: RoutingLayout,
    num_hidden_layers: int,
    *,
    start: int = 0,
    num_tokens: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Routing:
    """Read such a text.

    Args:
        start: `meta_info["routed_experts_start_len"]`, if any. A server that ignores the start of a request says 0.
        num_tokens: prompt and response; where given, the number of rows must fit.
        max_nbytes: most decoded bytes.

    Raises:
        BadInput: no base64, too long, no whole rows, picks in a dense layer, ids out of range, an expert twice in a
            row.
    """
    field = "routed_experts"
    layout.check()
    check_start(start)
    check_count(num_hidden_layers, "num_hidden_layers", 1)
    raw = decode(text, field, max_nbytes)
    row_nbytes = num_hidden_layers * layout.top_k * 4
    if len(raw) % row_nbytes:
        raise BadInput(field, f"{len(raw)} bytes are no rows of {num_hidden_layers} x {layout.top_k} int32")
    array = np.frombuffer(raw, "<i4").reshape(-1, num_hidden_layers, layout.top_k)
    check_num_rows(array.shape[0], start, num_tokens, field)
    return rows_of(moe_layers_only(array, layout, num_hidden_layers, field), layout, start, field)
