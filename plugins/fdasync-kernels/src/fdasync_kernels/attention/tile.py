"""The inner loop that decode and prefill share: a running softmax of a tile of query rows over tiles of keys.

A head's dimensions are two parts, the largest power of two and a padded rest, so that 192 or 576 waste little. Keys
and values past the end are loaded as zeros: a block that is used again may hold NaN, and 0 * NaN is NaN. Knows views
and one sequence's table, and not which sequences the rows belong to. Called by `decode.py` and `prefill.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.attention.fixed import weigh
from fdasync_kernels.pages import Pages, pages_of

if TYPE_CHECKING:
    import torch

ReachKind = Literal["full", "window", "chunk", "from"]

REACH_CODES: dict[ReachKind, int] = {"full": 0, "window": 1, "chunk": 2, "from": 3}  # the kernels' REACH
LOG2E = 1.4426950408889634


def is_short(kind: ReachKind) -> bool:
    """Whether a query of this reach sees at most `reach_size` keys."""
    return kind in ("window", "chunk")


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut.

    Attributes:
        rows, keys: of a tile.
        warps: of a program.
        stages: of a program's pipeline of loads.
        registers: of a thread, at most; None: as many as the compiler likes.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def split_dims(dim: int) -> tuple[int, int]:
    """A head's dimensions as two powers of two of at least 16 that cover it; the second is 0 where one is enough."""
    if dim <= 16:
        return 16, 0
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


def check_views(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, value_dim: int | None
) -> tuple[Pages, Pages, int]:
    """Where keys and values are (of latents, the keys twice), and the width of the values.

    Raises BadInput for tensors that the kernels would read wrongly.
    """
    if query.stride(2) != 1:
        raise BadInput("query", "the last dimension must be contiguous")
    here = pages_of(keys)
    if query.shape[1] % here.heads or query.shape[2] != here.dim:
        raise BadInput("query", f"{tuple(query.shape)} does not fit keys {tuple(keys.shape)}")
    if query.dtype != keys.dtype:
        raise BadInput("query", f"is {query.dtype} and the pool {keys.dtype}")
    if values is not None:
        there = pages_of(values)
        if (there.heads, there.per_share) != (here.heads, here.per_share):
            raise BadInput("values", f"{tuple(values.shape)} does not fit keys {tuple(keys.shape)}")
        return here, there, there.dim
    if value_dim is None or value_dim > here.dim:
        raise BadInput("value_dim", "must say how much of a latent key is the value", limit=here.dim)
    if here.per_share > 1:
        raise BadInput("keys", "latents have one head")
    return here, here, value_dim


@triton.jit
def first_visible(position, REACH: tl.constexpr, reach_size):
    """The first key that a query at this position sees."""
    if REACH == 1:
        return tl.maximum(position - reach_size + 1, 0)
    elif REACH == 2:
        return position // reach_size * reach_size
    elif REACH == 3:
        return tl.minimum(position, reach_size)
    else:
        return position * 0


@triton.jit
def load_rows(rows, real, DIM: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Elements BEGIN .. BEGIN + WIDTH of `real` rows, zeros in other rows and past DIM. Without MASKED every row is."""
    dims = BEGIN + tl.arange(0, WIDTH)
    where = rows[:, None] + dims[None, :]
    if MASKED:
        if BEGIN + WIDTH <= DIM:
            return tl.load(where, mask=real[:, None], other=0.0)
        else:
            return tl.load(where, mask=real[:, None] & (dims < DIM)[None, :], other=0.0)
    else:
        if BEGIN + WIDTH <= DIM:
            return tl.load(where)
        else:
            return tl.load(where, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def multiply(left, right, sums, WIDEN: tl.constexpr):
    """sums + left @ right in float32, exact products; WIDEN: for the interpreter, which takes bfloat16 for its bits."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def add_weights(weights, totals, shrink, KEYS: tl.constexpr, WIDEN: tl.constexpr):
    """Sums of weights [M, 16], all columns alike, take one more tile's (in the values' type) by a product with ones."""
    ones = tl.full([KEYS, 16], 1.0, tl.float32).to(weights.dtype)
    return multiply(weights, ones, totals * shrink[:, None], WIDEN)


@triton.jit
def fold_keys(
    query, query_rest, best, total, sums,
    keys, values, table, start, high, first, last, scale,
    keys_block, keys_token, values_block, values_token,
    BLOCK_TOKENS: tl.constexpr, KEY_DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, SHARED: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, FIXED: tl.constexpr = False, low=0,
):  # fmt: skip
    """Take keys start .. start + BLOCK_N into a running softmax (base 2): its largest logit, weights, weighted values.

    With MASKED row r sees keys first[r] .. last[r], and keys from `high` on are not read; without MASKED every row must
    see all BLOCK_N keys. SHARED: the value is the key's first part, which is not loaded twice. FIXED: in the order of
    `fixed.py`, where keys before `low` are not read either, and `total` is [M, 16], all columns alike.
    """
    numbers = start + tl.arange(0, BLOCK_N)
    real = numbers < high
    if FIXED:
        real = real & (numbers >= low)
    if MASKED:
        blocks = tl.load(table + numbers // BLOCK_TOKENS, mask=real, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + numbers // BLOCK_TOKENS).to(tl.int64)
    tokens = numbers % BLOCK_TOKENS
    rows = keys + blocks * keys_block + tokens * keys_token
    key = load_rows(rows, real, KEY_DIM, 0, D1, MASKED)
    logits = tl.zeros([query.shape[0], BLOCK_N], tl.float32)
    logits = multiply(query, tl.trans(key), logits, WIDEN)
    if D2 > 0:
        key_rest = load_rows(rows, real, KEY_DIM, D1, D2, MASKED)
        logits = multiply(query_rest, tl.trans(key_rest), logits, WIDEN)
    if not FIXED:
        logits = logits * scale
    if MASKED:
        seen = (numbers[None, :] >= first[:, None]) & (numbers[None, :] <= last[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    if FIXED:
        above, weights, shrink = weigh(logits, best, scale)
        total = add_weights(weights.to(values.dtype.element_ty), total, shrink, BLOCK_N, WIDEN)
    else:
        above = tl.maximum(best, tl.max(logits, 1))
        base = above
        if MASKED:
            # a row that has seen nothing yet: -inf less -inf would be NaN
            base = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.math.exp2(logits - base[:, None])
        shrink = tl.math.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None]
    if SHARED:
        value = key
    else:
        value_rows = values + blocks * values_block + tokens * values_token
        value = load_rows(value_rows, real, VALUE_DIM, 0, DV, MASKED)
    sums = multiply(weights.to(value.dtype), value, sums, WIDEN)
    return above, total, sums
