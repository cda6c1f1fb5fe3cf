"""MoE layers only, or all hidden layers: converts between the two layer axes that trainers use.

Knows no trainer's format. Called by the converters beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput
from fdasync_trainer.rows.checks import RoutingLayout, check_count, check_routing

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from fdasync.result import Routing


def expand_layers(
    routing: Routing, num_hidden_layers: int | None, dtype: DTypeLike | None = None
) -> NDArray[np.generic]:
    """Rows over all hidden layers, [n, num_hidden_layers, K], new and C-contiguous; dense layers are zeros.

    Columns that do not count (`top_k_by_layer`) repeat the row's first pick: no trainer knows of such columns, and a
    mask of experts made of the row is right. So a row of an MoE layer is all zero only where one expert counts and
    expert 0 was picked.

    Args:
        routing: checked here.
        num_hidden_layers: None for the MoE layers alone.
        dtype: of the result; None for the dtype of the rows.

    Raises:
        BadInput: rows as in `check_routing`, or an MoE layer past the hidden ones.
    """
    layout = check_routing(routing)
    rows = routing.array
    counted = layout.counted
    if counted is not None:
        rows = np.where(counted, rows, rows[:, :, :1])
    wanted = rows.dtype if dtype is None else np.dtype(dtype)
    if num_hidden_layers is None:
        return rows.astype(wanted, order="C")
    _check_hidden(layout, num_hidden_layers)
    expanded = np.zeros((rows.shape[0], num_hidden_layers, rows.shape[2]), wanted)
    expanded[:, layout.layer_ids] = rows
    return expanded


def moe_layers_only(
    array: NDArray[np.generic], layout: RoutingLayout, num_hidden_layers: int | None, field: str = "array"
) -> NDArray[np.generic]:
    """[n, MoE layers, K] out of [n, num_hidden_layers, K].

    None for `num_hidden_layers`: the array has MoE layers alone, and is returned. Raises BadInput for another shape, or
    if a dense layer has values other than 0 and -1 (some formats write -1): then `layout` has other layers. Values of
    MoE layers are not checked.
    """
    layout.check()
    layers = len(layout.layer_ids) if num_hidden_layers is None else num_hidden_layers
    if array.ndim != 3 or array.shape[1:] != (layers, layout.top_k):
        raise BadInput(field, f"is of shape {list(array.shape)}", limit=f"[n, {layers}, {layout.top_k}]")
    if num_hidden_layers is None:
        return array
    _check_hidden(layout, num_hidden_layers)
    for layer in sorted(set(range(num_hidden_layers)) - set(layout.layer_ids)):
        if not np.isin(array[:, layer], (0, -1)).all():
            raise BadInput(field, f"layer {layer} is dense and has picks", hint="are the layer_ids those of the model?")
    return array[:, list(layout.layer_ids)]


def _check_hidden(layout: RoutingLayout, num_hidden_layers: int) -> None:
    check_count(num_hidden_layers, "num_hidden_layers", 1)
    if layout.layer_ids[-1] >= num_hidden_layers:
        problem = f"{num_hidden_layers} layers do not hold MoE layer {layout.layer_ids[-1]}"
        raise BadInput("num_hidden_layers", problem)
