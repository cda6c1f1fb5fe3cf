"""The experts of a MoE layer in a few launches: group, gate and up with the activation, down, sum of the slots.

A library runs some twenty kernels for this. Here `grouping.py` groups pairs (token, slot) by expert without padding;
`experts_gate_up` gathers the rows of its tile, makes both products and the activation, and writes rows in grouped
order; `experts_down` makes the second product, times the routing weight, and writes each pair's part to the pair's own
place; `experts_combine` sums a token's parts in the order of its slots. Few pairs are not grouped: each is a tile.

Nothing is added atomically, no product is split over its inner dimension, and every tile walks that dimension in order.
So the bits of a token depend on its own row, ids and weights alone, not on the tiles nor on the tokens beside it. Every
id in range is computed: there is no capacity. Ids out of range and padding rows read no weights.

Knows no models and no routing. The tiles come from `tiles.py`, the activations from `activation.py`.
Called by the plugins' fused experts. Runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from fdasync.errors import BadInput
from fdasync_kernels.chip import chip_of
from fdasync_kernels.experts.activation import Activation
from fdasync_kernels.experts.grouping import group
from fdasync_kernels.experts.inner_order import ordered_rows
from fdasync_kernels.experts.kernels import experts_combine, experts_down, experts_gate_up
from fdasync_kernels.experts.many import down_many, gate_up_many
from fdasync_kernels.experts.stored import StoredWeights
from fdasync_kernels.experts.stored_kernels import stored_down, stored_gate_up
from fdasync_kernels.experts.tiles import choose_stored_tiles, choose_tiles
from fdasync_kernels.limits import FLOATS, MOST_EXPERTS
from fdasync_kernels.overlap import overlap
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from fdasync_kernels.experts.tiles import Tile, Tiles

_SILU = Activation("silu")


@operation
def experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor | StoredWeights,
    down: torch.Tensor | StoredWeights,
    *,
    activation: Activation = _SILU,
    gated: bool = True,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    live: torch.Tensor | None = None,
    parts: bool = False,
    slices: int = 1,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Compute the chosen experts of every token: sum over slots of weight * down(activation(gate, up)).

    Sums are float32. They are rounded to the dtype of `hidden` after the first product, where torch rounds inside the
    activation, after the weighted second product, and at the end. Queues two to six launches on the current stream
    without synchronising; a graph can capture them. No gradient. Nothing is compiled anew for another T of the same
    regime (`tiles.py`).

    Args:
        hidden: [T, H] float32, bfloat16 or float16, rows may be strided. Read.
        ids: [T, k] int64 or int32, contiguous: the experts of each slot. Ids outside of 0 .. E - 1 (padding, experts of
            other ranks) add nothing. Read.
        weights: [T, k], contiguous, any float dtype: the routing weights. Read.
        up: [E, 2I, H], gate rows and then up rows; [E, I, H] without a gate; last two swapped if `transposed`. The
            dtype of `hidden`. Or weights as they were stored, with `hidden` in bfloat16 and not `transposed`: the
            result has the bits that their dequantised values give.
        down: [E, H, I]; last two swapped if `transposed`. Of the kind of `up`.
        activation: of gate and up.
        gated: whether `up` holds gates.
        up_bias: [E, 2I] or [E, I]; down_bias: [E, H]. Both or none.
        interleaved: rows of `up` take turns, gate and up.
        live: int64 [T]; a row whose entry is negative is padding: no expert is read for it, its result is 0.
            None: all rows count.
        parts: return the weighted results of the slots, [T, k, H], instead of their sum. Slots that add nothing hold
            anything.
        slices: 2 or 4: the inner dimension of the second product is cut into so many parts. Each is what these experts
            are over that part of their width alone; the parts are added in float32 as a tree of neighbours.
        tiles: replaces the table's choice, for measurements.

    Returns:
        [T, H] (or the parts) in the dtype of `hidden`, new, the caller's; with slices float32 [T, H], not rounded.

    Raises:
        BadInput: shapes, strides or dtypes that the kernels do not take.
    """
    tokens, width = hidden.shape
    num_experts, inner = _check(hidden, ids, weights, up, down, gated, up_bias, down_bias, transposed, live)
    _check_slices(slices, inner, biased=down_bias is not None, parts=parts)
    top_k = ids.shape[1]
    pairs = tokens * top_k
    found = torch.empty((slices, tokens, top_k, width), dtype=hidden.dtype, device=hidden.device)
    summed = torch.float32 if slices > 1 else hidden.dtype
    if not tokens:
        return found[0] if parts else torch.empty_like(hidden, dtype=summed)
    if tiles is None:
        tiles = _chosen(hidden, top_k, up, down, inner, slices, gated, transposed, interleaved)
    if _crosses(tiles, inner, slices, stored=isinstance(up, StoredWeights)):
        raise BadInput("tiles", f"take {tiles.down.depth} at once of slices of {inner // slices}")
    held = torch.empty((pairs, inner), dtype=hidden.dtype, device=hidden.device)
    order, table, capacity = (ids, ids, pairs) if tiles.single else group(ids, live, num_experts, tiles)
    # without a mask any pointer does: that kernel has no instruction for it
    alive = ids if live is None else live
    masked = live is not None
    shared: dict[str, Any] = {
        "TOPK": top_k, "E": num_experts, "MASKED": masked, "SINGLE": tiles.single,
        "WIDEN": hidden.device.type == "cpu", "BIASED": up_bias is not None, "BM": tiles.rows,
        **overlap(hidden.device),
    }  # fmt: skip
    if isinstance(up, StoredWeights):
        rows = ordered_rows(hidden) if tiles.up.ready else hidden
        stored_gate_up[(capacity * triton.cdiv(inner, tiles.up.columns),)](
            rows, _values(up, tiles.up, 2 if gated else 1), up.scales,
            up.scales if up_bias is None else up_bias, held, order, table, ids, alive,
            activation.alpha, activation.limit, rows.stride(0), 0 if up_bias is None else up_bias.stride(0),
            K=width, N=inner, KIND=activation.kind_code, FORM=activation.form_code, GATED=gated,
            INTERLEAVED=interleaved, READY=tiles.up.ready, ORDERED=tiles.down.tma, **_launch_stored(up, tiles.up),
            COLUMNS=triton.cdiv(inner, tiles.up.columns), **shared,
        )  # fmt: skip
    elif tiles.up.many:
        gate_up_many(
            hidden, up, up_bias, held, order, table,
            top_k=top_k, gated=gated, activation=activation, rows=tiles.rows, tile=tiles.up,
        )  # fmt: skip
    else:
        experts_gate_up[(capacity * triton.cdiv(inner, tiles.up.columns),)](
            hidden, _operand(up, tiles.up), up if up_bias is None else up_bias, held, order, table, ids, alive,
            activation.alpha, activation.limit,
            hidden.stride(0), up.stride(0), *_strides(up, transposed), 0 if up_bias is None else up_bias.stride(0),
            K=width, N=inner, KIND=activation.kind_code, FORM=activation.form_code, GATED=gated,
            INTERLEAVED=interleaved, COLUMNS=triton.cdiv(inner, tiles.up.columns),
            PAIRED=tiles.up.paired and gated, **_launch(tiles.up), **shared,
        )  # fmt: skip
    if isinstance(down, StoredWeights):
        stored_down[(capacity * triton.cdiv(width, tiles.down.columns), slices)](
            held, _values(down, tiles.down, 1), down.scales, down.scales if down_bias is None else down_bias,
            weights, found, order, table, ids, alive, 0 if down_bias is None else down_bias.stride(0), found.stride(0),
            K=inner // slices, N=width, SLICES=slices, COLUMNS=triton.cdiv(width, tiles.down.columns),
            **_launch_stored(down, tiles.down), **shared,
        )  # fmt: skip
    elif tiles.down.many:
        down_many(held, down, down_bias, weights, found, order, table, rows=tiles.rows, tile=tiles.down)
    else:
        experts_down[(capacity * triton.cdiv(width, tiles.down.columns), slices)](
            held, _operand(down, tiles.down), down if down_bias is None else down_bias, weights, found, order, table,
            ids, alive, down.stride(0), *_strides(down, transposed), 0 if down_bias is None else down_bias.stride(0),
            found.stride(0), K=inner // slices, N=width, SLICES=slices, COLUMNS=triton.cdiv(width, tiles.down.columns),
            **_launch(tiles.down), **shared,
        )  # fmt: skip
    if parts:
        return found[0]
    out = torch.empty_like(hidden, dtype=summed, memory_format=torch.contiguous_format)
    columns = 256 if tokens <= 64 else 1024
    experts_combine[(tokens, triton.cdiv(width, columns))](
        found, ids, alive, out, found.stride(0),
        TOPK=top_k, E=num_experts, N=width, SLICES=slices, MASKED=masked, BN=columns,
        num_warps=2 if tokens <= 64 else 4, **overlap(hidden.device),
    )  # fmt: skip
    return out


def _chosen(
    hidden: torch.Tensor,
    top_k: int,
    up: torch.Tensor | StoredWeights,
    down: torch.Tensor | StoredWeights,
    inner: int,
    slices: int,
    gated: bool,
    transposed: bool,
    interleaved: bool,
) -> Tiles:
    """The tables' tiles."""
    tokens, num_experts = len(hidden), down.shape[0]
    large = chip_of(hidden.device).large
    if isinstance(up, StoredWeights) or isinstance(down, StoredWeights):
        if not isinstance(up, StoredWeights) or not isinstance(down, StoredWeights):
            raise BadInput("down", "one of both products has stored weights, and the other has plain ones")
        depth = inner // slices if slices > 1 else 0
        bulk = large and not interleaved and up.fits_bulk and down.fits_bulk
        return choose_stored_tiles(tokens, top_k, num_experts, depth, gated=gated, bulk=bulk)
    cut = {"large": large, "bulk": fits_bulk(up, down, transposed, interleaved)}
    tiles = choose_tiles(tokens, top_k, num_experts, hidden.dtype, **cut)
    if _crosses(tiles, inner, slices):
        tiles = choose_tiles(tokens, top_k, num_experts, hidden.dtype, **{**cut, "bulk": False})
    return tiles


def fits_bulk(up: torch.Tensor, down: torch.Tensor, transposed: bool, interleaved: bool) -> bool:
    """Whether the bulk copy engine can read these weights (`choose_tiles`)."""
    if transposed or interleaved:
        return False
    return all(w.shape[2] * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0 for w in (up, down))


def _operand(weights: torch.Tensor, tile: Tile) -> Any:
    """The weights as a kernel takes them: the tensor, or a descriptor of all experts' rows, one below the other."""
    if not tile.tma:
        return weights
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = weights.shape[0] * weights.shape[1]
    columns = weights.shape[2]
    return TensorDescriptor(weights, [rows, columns], [columns, 1], [tile.columns, tile.depth])


def _values(weights: StoredWeights, tile: Tile, halves: int) -> Any:
    """As `_operand`."""
    return weights.descriptor(halves, tile.columns, tile.depth) if tile.tma else weights.values


def _strides(weights: torch.Tensor, transposed: bool) -> tuple[int, int]:
    """Strides of an output row and of the inner dimension."""
    return (weights.stride(2), weights.stride(1)) if transposed else (weights.stride(1), weights.stride(2))


def _launch(tile: Tile) -> dict[str, Any]:
    return {
        "BN": tile.columns, "BK": tile.depth, "SWAP": tile.swap, "TMA": tile.tma,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _launch_stored(weights: StoredWeights, tile: Tile) -> dict[str, Any]:
    return {
        "FOUR": weights.form == "mxfp4", "BULK": tile.tma, "BN": tile.columns, "BK": tile.depth,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _crosses(tiles: Tiles, inner: int, slices: int, *, stored: bool = False) -> bool:
    """Whether weights would be read on into the next slice."""
    return slices > 1 and (tiles.down.tma or stored) and inner // slices % tiles.down.depth > 0


def _check_slices(slices: int, inner: int, *, biased: bool, parts: bool) -> None:
    if slices not in (1, 2, 4) or inner % slices:
        raise BadInput("slices", f"{slices} of a width of {inner}", limit="1, 2 or 4 that divide it")
    if slices > 1 and (biased or parts):
        raise BadInput("slices", "experts with a bias, or whose parts are asked for, have one slice", limit=1)


def _check(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor | StoredWeights,
    down: torch.Tensor | StoredWeights,
    gated: bool,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    live: torch.Tensor | None,
) -> tuple[int, int]:
    """The number of experts and their inner width. Raises BadInput."""
    if hidden.dim() != 2 or hidden.dtype not in FLOATS or hidden.stride(1) != 1:
        raise BadInput("hidden", f"{hidden.dtype} {tuple(hidden.shape)} where rows of floats were expected")
    tokens, width = hidden.shape
    if ids.dim() != 2 or len(ids) != tokens or not ids.is_contiguous() or ids.dtype not in (torch.int64, torch.int32):
        raise BadInput("ids", f"{ids.dtype} {tuple(ids.shape)} where contiguous integers [{tokens}, k] were expected")
    if weights.shape != ids.shape or not weights.is_contiguous() or not weights.is_floating_point():
        raise BadInput("weights", f"{weights.dtype} {tuple(weights.shape)} beside ids {tuple(ids.shape)}")
    if len(down.shape) != 3 or not 1 <= down.shape[0] <= MOST_EXPERTS:
        raise BadInput("down", f"shape {tuple(down.shape)} where [experts, H, I] was expected", limit=MOST_EXPERTS)
    num_experts = down.shape[0]
    out_width, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
    rows = 2 * inner if gated else inner
    wanted = (num_experts, width, rows) if transposed else (num_experts, rows, width)
    if out_width != width or tuple(up.shape) != wanted:
        raise BadInput("up", f"shape {tuple(up.shape)} beside down {tuple(down.shape)} and rows of {width}")
    if isinstance(up, StoredWeights) or isinstance(down, StoredWeights):
        if type(up) is not type(down) or transposed or hidden.dtype is not torch.bfloat16:
            raise BadInput("up", "weights as they were stored are so for both products, not transposed, for bfloat16")
    elif not up.is_contiguous() or not down.is_contiguous() or {up.dtype, down.dtype} != {hidden.dtype}:
        raise BadInput("up", f"weights must be contiguous {hidden.dtype}")
    if (up_bias is None) != (down_bias is None):
        raise BadInput("up_bias", "there is one bias of two")
    if up_bias is not None and (tuple(up_bias.shape) != (num_experts, rows) or up_bias.stride(1) != 1):
        raise BadInput("up_bias", f"shape {tuple(up_bias.shape)} where [{num_experts}, {rows}] was expected")
    if down_bias is not None and (tuple(down_bias.shape) != (num_experts, width) or down_bias.stride(1) != 1):
        raise BadInput("down_bias", f"shape {tuple(down_bias.shape)} where [{num_experts}, {width}] was expected")
    if live is not None and (live.shape != (tokens,) or live.dtype is not torch.int64 or not live.is_contiguous()):
        raise BadInput("live", f"{live.dtype} {tuple(live.shape)} where int64 [{tokens}] was expected")
    return num_experts, inner
