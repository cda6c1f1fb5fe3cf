"""Rows as SkyRL's servers send them: `{"data": base64, "shape": [...], "dtype": name}`.

Contract, read in SkyRL a9564572e (`skyrl/backends/skyrl_train/inference_servers/generate_wire.py`,
`skyrl/backends/skyrl_train/utils/routed_experts.py`): three axes, C order, no id below 0, and exactly the smallest of
uint8, int16 and int32 that holds the highest id of the payload; a reader refuses any other. The layer axis is as the
engine gives it. The payload names no start, and `skyrl/train/dataset/preprocess.py` puts its first row at the first
token: join rows that begin later to the rows before them (`append`) first. Called by users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput
from fdasync_trainer.rows.checks import RoutingLayout, check_num_rows, check_start, rows_of
from fdasync_trainer.rows.encoding import MAX_NBYTES, pack, unpack
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.result import Routing

_DTYPES = ("uint8", "int16", "int32")


def to_skyrl(routing: Routing, num_hidden_layers: int | None = None) -> dict[str, Any]:
    """The value of `choices[].routed_experts` of `/skyrl/v1/generate`.

    `num_hidden_layers` adds zero rows for dense layers. Raises BadInput as `expand_layers`.
    """
    rows = expand_layers(routing, num_hidden_layers)
    return pack(rows.astype(_narrowest(rows)))


def from_skyrl(
    payload: Mapping[str, Any],
    layout: RoutingLayout,
    *,
    num_hidden_layers: int | None = None,
    start: int = 0,
    num_tokens: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Routing:
    """Read such a payload; arguments as of `from_vllm`.

    Raises BadInput: no such payload, a dtype wider than its ids need, a shape that does not fit the bytes or the
    layout, too many bytes, picks in a dense layer, ids out of range, an expert twice in a row.
    """
    field = "routed_experts"
    check_start(start)
    array = unpack(payload, field, _DTYPES, max_nbytes)
    if array.dtype.name != _narrowest(array):
        raise BadInput(f"{field}.dtype", f"{array.dtype.name} where {_narrowest(array)} is enough")
    check_num_rows(array.shape[0], start, num_tokens, field)
    return rows_of(moe_layers_only(array, layout, num_hidden_layers, field), layout, start, field)


def _narrowest(array: NDArray[np.generic]) -> str:
    highest = int(array.max(initial=0))
    return "uint8" if highest < 1 << 8 else "int16" if highest < 1 << 15 else "int32"
