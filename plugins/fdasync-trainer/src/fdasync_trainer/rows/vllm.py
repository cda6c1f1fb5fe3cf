"""Rows as vLLM answers them: base64 of a `.npy`.

Contract, read in vllm-project/vllm, the test of `/v1/completions` with `--enable-return-routed-experts`, which loads
`choices[].routed_experts` with `numpy.load` of the decoded text: [tokens - 1 - prompt start, layers, top_k], uint8 up
to 256 experts, else uint16 (PR 39568); v0.21 wrote int16 (its docs/training/routed_experts_replay). By
`verl/utils/veomni/router_replay.py` the layer axis has all hidden layers, by the text of v0.21 MoE layers alone: this
module has both. The text names no start: the caller that asked for one (`routed_experts_prompt_start`) knows it. Called
by users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_trainer.rows.checks import RoutingLayout, check_num_rows, check_start, rows_of
from fdasync_trainer.rows.encoding import MAX_NBYTES, decode, encode, load_npy, save_npy
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from fdasync.result import Routing


def to_vllm(routing: Routing, num_hidden_layers: int | None = None) -> str:
    """The value of `choices[].routed_experts`; uint8 or uint16 by the number of experts.

    `num_hidden_layers` adds zero rows for dense layers; None leaves the MoE layers alone, which is the same where every
    layer is one. Raises BadInput as `expand_layers`.
    """
    array = expand_layers(routing, num_hidden_layers, RoutingLayout.of(routing).dtype)
    return encode(save_npy(array))


def from_vllm(
    text: str,
    layout: RoutingLayout,
    *,
    num_hidden_layers: int | None = None,
    start: int = 0,
    num_tokens: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Routing:
    """Read such a text, of any little-endian integers.

    Args:
        num_hidden_layers: of the array's layer axis; None where it has MoE layers alone.
        start: the `routed_experts_prompt_start` of the request.
        num_tokens: prompt and response; where given, the number of rows must fit.
        max_nbytes: most decoded bytes.

    Raises:
        BadInput: no base64, too long, no `.npy` of integers in C order, a shape that does not fit the bytes or the
            layout, picks in a dense layer, ids out of range (-1 marks a hit without rows in v0.21), an expert twice in
            a row.
    """
    field = "routed_experts"
    check_start(start)
    array = load_npy(decode(text, field, max_nbytes), field)
    check_num_rows(array.shape[0], start, num_tokens, field)
    return rows_of(moe_layers_only(array, layout, num_hidden_layers, field), layout, start, field)
