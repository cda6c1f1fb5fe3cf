"""Rows as verl takes them: int16, padded with zeros along the axis of absolute positions.

Contract, read in verl 1dda039b9: `verl/experimental/agent_loop/agent_loop.py` turns an engine's rows into int16
[prompt + response, layers, top_k], row p for absolute position p, trailing rows zero, and in padded batches moves them
behind the left padding of the prompt; `verl/utils/megatron/router_replay_utils.py` takes all hidden layers or MoE
layers alone (it tells them apart by their number) and masks the last row; `verl/utils/veomni/router_replay.py` wants
all hidden layers and top_k > 1, and routes any row with a repeated id live, zero rows among them. Called by users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput
from fdasync_trainer.rows.checks import RoutingLayout, check_count, check_start, is_rows, rows_of
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.result import Routing


def to_verl(
    routing: Routing,
    padded_len: int,
    *,
    num_hidden_layers: int | None = None,
    left_pad: int = 0,
    zero_prefix: bool = False,
) -> NDArray[np.int16]:
    """[padded_len, layers, top_k], new; row `left_pad + p` is the row of position p, missing rows are zero.

    Args:
        padded_len: tokens of prompt, response and padding.
        num_hidden_layers: adds zero rows for dense layers; None leaves the MoE layers alone.
        left_pad: padding before the first token.
        zero_prefix: let rows before `start` be zero. VeOmni routes these positions live; Megatron would send them all
            to expert 0, so rows that begin after 0 are refused without it.

    Raises:
        BadInput: rows as in `expand_layers`, rows that do not fit, a start above 0 without `zero_prefix`, more than
            32,768 experts.
    """
    check_count(padded_len, "padded_len")
    check_count(left_pad, "left_pad")
    rows = expand_layers(routing, num_hidden_layers)
    if routing.num_experts > 1 << 15:
        raise BadInput("routing.num_experts", f"{routing.num_experts} do not fit int16", limit=1 << 15)
    if routing.start and rows.size and not zero_prefix:
        raise BadInput(
            "routing.start",
            f"positions 0 to {routing.start - 1} have no rows, and verl would replay zeros there",
            hint="append these rows to the earlier ones, or set zero_prefix=True for VeOmni",
        )
    stop = left_pad + routing.start + rows.shape[0]
    if stop > padded_len:
        raise BadInput("padded_len", f"{padded_len} is too short", limit=f"{stop} or more")
    padded = np.zeros((padded_len, *rows.shape[1:]), np.int16)
    padded[left_pad + routing.start : stop] = rows
    return padded


def from_verl(
    array: NDArray[np.generic],
    layout: RoutingLayout,
    num_rows: int,
    *,
    num_hidden_layers: int | None = None,
    left_pad: int = 0,
    start: int = 0,
) -> Routing:
    """Read `num_rows` rows from position `start` on; the padded array says neither number.

    Raises BadInput: no integers [n, layers, top_k], too few rows, a row outside these that is not zero, picks in a
    dense layer, ids out of range, an expert twice in a row.
    """
    field = "array"
    check_count(num_rows, "num_rows")
    check_count(left_pad, "left_pad")
    check_start(start)
    if not is_rows(array) or array.dtype.kind not in "iu":
        raise BadInput(field, "is no array of integers of three axes", limit="[n, layers, top_k]")
    first = left_pad + start
    if first + num_rows > array.shape[0]:
        raise BadInput("num_rows", f"{num_rows} from row {first} on are more than there are", limit=array.shape[0])
    if array[:first].any() or array[first + num_rows :].any():
        raise BadInput(field, f"has rows outside {first} to {first + num_rows - 1}", hint="is num_rows right?")
    rows = array[first : first + num_rows]
    return rows_of(moe_layers_only(rows, layout, num_hidden_layers, field), layout, start, field)
