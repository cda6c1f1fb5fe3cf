"""Rows as NeMo-RL takes them: the text `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`, one row for every token.

Contract, read in NeMo-RL 7ea279abf (`nemo_rl/utils/routed_experts_codec.py`,
`nemo_rl/models/generation/vllm/utils.py`, `nemo_rl/models/generation/interfaces.py`): [tokens, MoE layers, top_k], the
narrowest of int8, int16 and int32 that holds the number of experts less one; missing rows are -1 and use the live
router; the last token has no row, so 0 to top_k - 1 stands there. NeMo-RL refuses an expert twice in a row, so the
format has no form for layers of differing top_k. Called by users.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput
from fdasync_trainer.rows.checks import RoutingLayout, check_count, rows_of
from fdasync_trainer.rows.encoding import MAX_NBYTES, decode, encode, shaped
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only

if TYPE_CHECKING:
    from fdasync.result import Routing

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,19})x(\d{1,19})x(\d{1,19}):", re.ASCII)


def to_nemo_rl(routing: Routing, num_tokens: int) -> str:
    """A row for each of `num_tokens` tokens, prompt and response; -1 where `routing` has none.

    Raises BadInput: rows as in `check_routing`, more rows than tokens less one, layers of differing top_k.
    """
    check_count(num_tokens, "num_tokens", 1)
    rows = expand_layers(routing, None)
    _check_even(RoutingLayout.of(routing), "routing")
    stop = routing.start + rows.shape[0]
    if rows.shape[0] and stop > num_tokens - 1:
        raise BadInput("num_tokens", f"{num_tokens} tokens have rows for {num_tokens - 1}", limit=f"{stop + 1} or more")
    _, layers, top_k = rows.shape
    full = np.full((num_tokens, layers, top_k), -1, _dtype(routing.num_experts))
    full[routing.start : stop] = rows
    full[-1] = np.arange(top_k)
    return f"nrlre1:{full.dtype.name}:{num_tokens}x{layers}x{top_k}:{encode(full)}"


def from_nemo_rl(text: str, layout: RoutingLayout, *, max_nbytes: int = MAX_NBYTES) -> Routing:
    """Read such a text. Leaves out the last token's row, and missing rows at either end.

    Without any rows, `start` is 0.

    Raises:
        BadInput: no such text, a shape that does not fit the bytes or the layout, too many bytes, rows missing between
            others, a row half missing, ids out of range, an expert twice in a row.
    """
    field = "routed_experts"
    layout.check()
    _check_even(layout, "layout")
    head = _ENVELOPE.match(str(text))
    if head is None:
        raise BadInput(field, "is no 'nrlre1:<dtype>:<S>x<L>x<K>:<base64>'")
    name, *dims = head.groups()
    shape = tuple(int(dim) for dim in dims)
    raw = decode(text[head.end() :], field, max_nbytes)
    full = shaped(raw, shape, np.dtype(name).newbyteorder("<"), field)
    rows = moe_layers_only(full[:-1], layout, None, field)
    there = np.flatnonzero((rows != -1).any(axis=(1, 2)))
    start, stop = (int(there[0]), int(there[-1]) + 1) if there.size else (0, 0)
    if there.size != stop - start:
        missing = int(np.setdiff1d(np.arange(start, stop), there)[0])
        raise BadInput(field, f"position {missing} has no row, and others before and after it have")
    return rows_of(rows[start:stop], layout, start, field)


def _check_even(layout: RoutingLayout, field: str) -> None:
    if layout.counted is not None:
        problem = "differs by layer, and this format has no place for that"
        raise BadInput(f"{field}.top_k_by_layer", problem)


def _dtype(num_experts: int) -> type[np.signedinteger]:
    return np.int8 if num_experts <= 1 << 7 else np.int16 if num_experts <= 1 << 15 else np.int32
