"""Rows as prime-rl's servers send them: `{"data": base64, "shape": [...], "start": n, "dtype": name}`.

Contract, read in prime-rl of August 2026 (`src/prime_rl/inference/vllm/routed_experts.py`): three axes, C order, uint8
unless an id above 255 is there, else uint16; `start` is the position of the first row, so that each request of a
conversation sends new rows only. Payloads without the dtype field are uint8. Called by users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_trainer.rows.checks import RoutingLayout, check_num_rows, check_start, rows_of
from fdasync_trainer.rows.encoding import MAX_NBYTES, pack, unpack
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.result import Routing


def to_prime_rl(routing: Routing, num_hidden_layers: int | None = None) -> dict[str, Any]:
    """The value of `choices[].routed_experts`. `num_hidden_layers` adds zero rows for dense layers.

    Raises BadInput as `expand_layers`.
    """
    rows = expand_layers(routing, num_hidden_layers)
    return {**pack(rows.astype("uint8" if int(rows.max(initial=0)) < 1 << 8 else "uint16")), "start": routing.start}


def from_prime_rl(
    payload: Mapping[str, Any],
    layout: RoutingLayout,
    *,
    num_hidden_layers: int | None = None,
    num_tokens: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Routing:
    """Read such a payload; arguments as of `from_vllm`, with the start of the payload.

    Raises BadInput: no such payload, a shape that does not fit the bytes or the layout, too many bytes, picks in a
    dense layer, ids out of range, an expert twice in a row.
    """
    field = "routed_experts"
    array = unpack(payload, field, ("uint8", "uint16"), max_nbytes, default="uint8")
    start = payload.get("start", 0)
    check_start(start, f"{field}.start")
    check_num_rows(array.shape[0], start, num_tokens, field)
    return rows_of(moe_layers_only(array, layout, num_hidden_layers, field), layout, start, field)
