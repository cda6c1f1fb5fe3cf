"""Linear recurrence over the sequences of a step: the core of gated delta nets, Kimi delta attention and Mamba 2.

For each head a state S [values, keys] goes from token to token: S = S * decay, then S = S + update (x) key, and the
output is S @ query. The update is the value, or by the *delta rule* beta * (value - S @ key). A token's numbers are
computed in one order of sums, whether it comes alone, in a chunk or behind a snapshot: so its bits follow from its
sequence alone. Rows and states are as in `spans.py`. Knows no models. Called by the plugins' GPU runners. Runs on CUDA,
or on the CPU under Triton's interpreter (tests).

Source of the delta rule with decay: Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from fdasync_kernels.recurrence.spans import Spans

#: how queries and keys are scaled to unit length: not at all, by the inverse root, or by division
Norm = Literal["none", "rsqrt", "divide"]
_NORMS: dict[Norm, int] = {"none": 0, "rsqrt": 1, "divide": 2}
_EPSILON: tl.constexpr = tl.constexpr(1e-6)
_WIDEST_KEY = 256
# sequences whose programs do not fill a GPU
_FEW = 4
# what the 32 threads of a warp load at once
_WARP_NBYTES = 32 * 16


class Gates(NamedTuple):
    """Weights of a gated delta net, [H] each, contiguous; see `recur`."""

    growth: torch.Tensor
    bias: torch.Tensor


@triton.jit
def _unit(x, norm: tl.constexpr):
    if norm == 1:
        x = x * tl.rsqrt(tl.sum(x * x, 0) + _EPSILON)
    if norm == 2:
        x = x / tl.sqrt(tl.sum(x * x, 0) + _EPSILON)
    return x


@triton.jit
def _growth(growth, bias, head, raw: tl.constexpr):
    """A head's factor of the softplus, and the bias that is added before the softplus."""
    if raw:
        return -tl.exp(tl.load(growth + head).to(tl.float32)), tl.load(bias + head).to(tl.float32)
    else:
        return 0.0, 0.0


@triton.jit
def _gates(fade, rate, growth, bias, raw: tl.constexpr):
    """Logarithm of the decay, and rate; of what a layer projects where `raw`, rounded as the library rounds."""
    if raw:
        x = fade.to(tl.float32) + bias
        e = tl.exp(tl.minimum(x, 20.0))
        # log(1 + e) loses the places of a small e
        y = tl.minimum(e, 0.01)
        small = y * (1.0 - y * (0.5 - y * (0.333333333 - y * (0.25 - y * 0.2))))
        fade = growth * tl.where(x > 20.0, x, tl.where(e < 0.01, small, tl.log(1.0 + e)))
        rate = (1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))).to(rate.dtype)
    return fade, rate


@triton.jit
def _token(
    state, q, key, update, fade, rate, scale, delta: tl.constexpr, norm: tl.constexpr
):  # fmt: skip
    """The state behind a token, and the token's output: the one order of sums that all kernels here have."""
    q = _unit(q.to(tl.float32), norm) * scale
    key = _unit(key.to(tl.float32), norm)
    update = update.to(tl.float32)
    # [1, keys] or [1, 1]
    state = state * tl.exp(fade.to(tl.float32))[None, :]
    if delta:
        update = (update - tl.sum(state * key[None, :], 1)) * rate.to(tl.float32)
    state = state + update[:, None] * key[None, :]
    return state, tl.sum(state * q[None, :], 1)


@triton.jit(
    do_not_specialize_on_alignment=[
        "query", "key", "value", "decay", "beta", "growth", "bias", "out", "states", "sources", "first_stops", "stops",
    ],
)  # fmt: skip
def _single_kernel(
    query, key, value, decay, beta, growth, bias, out, states, sources, first_stops, stops, scale,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
    out_row, out_head, state_row, state_head, state_value, state_key,
    keys: tl.constexpr, values: tl.constexpr, group: tl.constexpr, delta: tl.constexpr, by_key: tl.constexpr,
    norm: tl.constexpr, raw: tl.constexpr, key_cells: tl.constexpr, value_cells: tl.constexpr,
):  # fmt: skip
    """Sequences of one token: nothing that is loaded waits for another load but the state, for its row."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    source = tl.load(sources + sequence)
    at = sequence.to(tl.int64)
    k = tl.arange(0, key_cells)
    v = tl.program_id(0) * value_cells + tl.arange(0, value_cells)
    fades = k if by_key else tl.arange(0, 1)
    first_stop, end_stop = tl.load(first_stops + sequence), tl.load(first_stops + sequence + 1)
    q = tl.load(query + at * query_row + head // group * query_head + k, mask=k < keys, other=0.0)
    key_ = tl.load(key + at * key_row + head // group * key_head + k, mask=k < keys, other=0.0)
    update = tl.load(value + at * value_row + head * value_head + v, mask=v < values, other=0.0)
    # raw gates stand by groups of heads
    gate = head // group * decay_head + head % group if raw else head * decay_head
    rated = head // group * beta_head + head % group if raw else head * beta_head
    fade = tl.load(decay + at * decay_row + gate + fades, mask=fades < keys, other=0.0)
    rate = tl.load(beta + at * beta_row + rated)
    growing, added = _growth(growth, bias, head, raw)
    fade, rate = _gates(fade, rate, growing, added, raw)
    cells = head * state_head + v[:, None] * state_value + k[None, :] * state_key
    here = (v < values)[:, None] & (k < keys)[None, :]
    held = states + tl.maximum(source, 0).to(tl.int64) * state_row
    begun = (k < tl.where(source >= 0, keys, 0))[None, :]
    state = tl.load(held + cells, mask=here & begun, other=0.0, eviction_policy="evict_first").to(tl.float32)
    state, result = _token(state, q, key_, update, fade, rate, scale, delta, norm)
    result = tl.where(source > -2, result, 0.0)
    tl.store(out + at * out_row + head * out_head + v, result, mask=v < values)
    if source > -2:
        for stop in range(first_stop, end_stop):
            target = states + tl.load(stops + 2 * stop + 1).to(tl.int64) * state_row
            tl.store(target + cells, state, mask=here, eviction_policy="evict_first")


@triton.jit(
    do_not_specialize_on_alignment=[
        "query", "key", "value", "decay", "beta", "growth", "bias", "out", "states", "sources", "first_rows",
        "first_stops", "stops",
    ],
)  # fmt: skip
def _recur_kernel(
    query, key, value, decay, beta, growth, bias, out, states, sources, first_rows, first_stops, stops, scale,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
    out_row, out_head, state_row, state_head, state_value, state_key,
    keys: tl.constexpr, values: tl.constexpr, group: tl.constexpr, delta: tl.constexpr, by_key: tl.constexpr,
    norm: tl.constexpr, raw: tl.constexpr, key_cells: tl.constexpr, value_cells: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    source = tl.load(sources + sequence)
    if source > -2:
        k = tl.arange(0, key_cells)
        v = tl.program_id(0) * value_cells + tl.arange(0, value_cells)
        cells = head * state_head + v[:, None] * state_value + k[None, :] * state_key
        here = (v < values)[:, None] & (k < keys)[None, :]
        held = states + tl.maximum(source, 0).to(tl.int64) * state_row
        state = tl.load(held + cells, mask=here & (k < tl.where(source >= 0, keys, 0))[None, :], other=0.0).to(
            tl.float32
        )
        # one logarithm of a decay, or one for each key's cell
        fades = k if by_key else tl.arange(0, 1)
        begin = tl.load(first_rows + sequence)
        wide = begin.to(tl.int64) * 0
        last = tl.load(first_rows + sequence + 1)
        at = wide + begin
        # what a token needs is loaded while the one before it is computed
        q = tl.load(query + at * query_row + head // group * query_head + k, mask=k < keys, other=0.0)
        key_ = tl.load(key + at * key_row + head // group * key_head + k, mask=k < keys, other=0.0)
        update = tl.load(value + at * value_row + head * value_head + v, mask=v < values, other=0.0)
        # raw gates stand by groups of heads
        gate = head // group * decay_head + head % group if raw else head * decay_head
        rated = head // group * beta_head + head % group if raw else head * beta_head
        fade = tl.load(decay + at * decay_row + gate + fades, mask=fades < keys, other=0.0)
        rate = tl.load(beta + at * beta_row + rated)
        growing, added = _growth(growth, bias, head, raw)
        first_stop = tl.load(first_stops + sequence)
        for stop in range(first_stop, tl.load(first_stops + sequence + 1)):
            # not carried from stop to stop: Triton 3.6 would forget it
            before = tl.load(stops + 2 * tl.maximum(stop - 1, first_stop))
            for row in range(tl.where(stop > first_stop, before, begin), tl.load(stops + 2 * stop)):
                at = wide + row
                behind = wide + tl.minimum(row + 1, last - 1)
                next_q = tl.load(query + behind * query_row + head // group * query_head + k, mask=k < keys, other=0.0)
                next_key = tl.load(key + behind * key_row + head // group * key_head + k, mask=k < keys, other=0.0)
                next_update = tl.load(value + behind * value_row + head * value_head + v, mask=v < values, other=0.0)
                next_fade = tl.load(decay + behind * decay_row + gate + fades, mask=fades < keys, other=0.0)
                next_rate = tl.load(beta + behind * beta_row + rated)
                faded, rating = _gates(fade, rate, growing, added, raw)
                state, result = _token(state, q, key_, update, faded, rating, scale, delta, norm)
                tl.store(out + at * out_row + head * out_head + v, result, mask=v < values)
                q, key_, update, fade, rate = next_q, next_key, next_update, next_fade, next_rate
            target = states + tl.load(stops + 2 * stop + 1).to(tl.int64) * state_row
            tl.store(target + cells, state, mask=here)


@operation
def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    *,
    scale: float = 1.0,
    norm: Norm = "none",
    dtype: torch.dtype | None = None,
    gates: Gates | None = None,
) -> torch.Tensor:
    """Run a step's rows through the recurrence, and leave the states at its stops; one launch, capturable.

    Computed in float32. Rows of no sequence are zeros.

    Args:
        query, key: [T, G, K], of any stride but in their last dimension; each serves H / G value heads that stand
            side by side.
        value: [T, H, V], likewise.
        decay: logarithms, [T, H], or [T, H, K] for one of each key's cell.
        beta: [T, H], the rate of the delta rule; None: the update is the value.
        states: [rows, H, V, K] of any stride; fast where keys lie side by side. Written.
        spans: the step's.
        scale: of queries. norm: of queries and keys before.
        dtype: of the result; None: that of values.
        gates: decay and beta are [T, G, H / G], as a layer projects them, with the last dimension side by side; the
            logarithm of the decay is -exp(growth) * softplus(decay + bias), the rate the sigmoid of beta.

    Returns:
        [T, H, V].

    Raises:
        BadInput: another shape or dtype; keys of more than 256 cells.
    """
    rows, heads, values = _check(query, key, value, decay, beta, states, spans, gates)
    groups, keys = query.shape[1:]
    single = spans.owners is None
    # a program writes the row of a sequence of one token, zeros where it is absent; other padding no program writes
    make = torch.empty if single else torch.zeros
    out = make((rows, heads, values), dtype=dtype or value.dtype, device=value.device)
    if not rows or not len(spans.sources):
        return out.zero_()
    # one warp for each tile of values: it sums over keys by itself, and many programs hide each other's waiting
    few = len(spans.sources) <= _FEW
    key_cells = triton.next_power_of_2(keys)
    # a tile that a warp does not fill is dealt to its threads in another way, and keys are summed in another order
    filled = triton.cdiv(_WARP_NBYTES, key_cells * states.element_size())
    cells = min(max(filled, 8 if single else 4 if few else 16), triton.next_power_of_2(values))
    grid: Any = (triton.cdiv(values, cells), heads, len(spans.sources))
    rates = value if beta is None else beta
    growth, bias = (value, value) if gates is None else gates
    read = (query, key, value, decay, rates)
    tensors = (*read, growth, bias, out, states, spans.sources)
    strides = (*(stride for tensor in (*read, out) for stride in tensor.stride()[:2]), *states.stride())
    sizes: dict[str, Any] = {
        "keys": keys, "values": values, "group": heads // groups, "delta": beta is not None,
        "by_key": decay.dim() == 3 and gates is None,
        "norm": _NORMS[norm], "raw": gates is not None, "key_cells": key_cells, "value_cells": cells,
    }  # fmt: skip
    if single:
        _single_kernel[grid](*tensors, spans.first_stops, spans.stops, scale, *strides, **sizes, num_warps=1)
    else:
        _recur_kernel[grid](
            *tensors, spans.first_rows, spans.first_stops, spans.stops, scale, *strides, **sizes, num_warps=1
        )
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    spans: Spans,
    gates: Gates | None,
) -> tuple[int, int, int]:
    """Rows, value heads, and cells of a value."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.stride(2) != 1:
            raise BadInput(name, f"{tuple(tensor.shape)} of strides {tensor.stride()} where heads were expected")
    rows, heads, values = value.shape
    groups, keys = query.shape[1:]
    if key.shape != query.shape or len(query) != rows or heads % groups:
        raise BadInput("key", f"{tuple(key.shape)} with queries {tuple(query.shape)}, values {tuple(value.shape)}")
    if keys > _WIDEST_KEY:
        raise BadInput("key", f"of {keys} cells", limit=f"{_WIDEST_KEY}")
    if gates is not None:
        shape = (rows, groups, heads // groups)
        for name, projected in (("decay", decay), ("beta", beta)):
            if projected is None or tuple(projected.shape) != shape or projected.stride(2) != 1:
                raise BadInput(name, f"{projected if projected is None else tuple(projected.shape)}, not {shape}")
        if any(tuple(each.shape) != (heads,) or not each.is_contiguous() for each in gates):
            raise BadInput("gates", f"{[tuple(each.shape) for each in gates]} for {heads} heads")
    else:
        by_key = decay.dim() == 3
        if tuple(decay.shape) not in ((rows, heads), (rows, heads, keys)) or (by_key and decay.stride(2) != 1):
            raise BadInput("decay", f"{tuple(decay.shape)} for {rows} rows of {heads} heads")
        if beta is not None and tuple(beta.shape) != (rows, heads):
            raise BadInput("beta", f"{tuple(beta.shape)} for {rows} rows of {heads} heads")
    if tuple(states.shape[1:]) != (heads, values, keys):
        raise BadInput("states", f"{tuple(states.shape)} where [rows, {heads}, {values}, {keys}] was expected")
    expected = len(spans.sources) if spans.owners is None else len(spans.owners)
    if rows != expected:
        raise BadInput("value", f"{rows} rows, and the spans are of {expected}")
    return rows, heads, values
