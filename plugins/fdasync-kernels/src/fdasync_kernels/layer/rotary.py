"""The rotary embedding of queries and keys in one launch.

A library rotates by ten small kernels. Families differ in which dimensions make a pair, in where the rotated ones are
put, in how wide the tables of cosines and sines are, and in the dtype of the products: `Style` says so. Every product
is rounded as the library rounds it, and then their sum, so that the bits are the library's. Knows no models. Called by
the plugins' fused rotary embeddings and by benchmarks. Runs on CUDA, or on the CPU under Triton's interpreter (tests).

For other kernels: `rotate_pair` rotates pairs in registers (launch with `enable_fp_fusion=False`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

_ELEMENTS = 1024
_INTERPRETED_TOKENS = 64
_WARPS = 4

Pairs = Literal["halves", "neighbours"]
Contraction = Literal["", "cos cos", "sin sin", "cos sin", "sin cos"]
CONTRACTIONS: tuple[Contraction, ...] = ("", "cos cos", "sin sin", "cos sin", "sin cos")


class Style(NamedTuple):
    """How a family rotates the R dimensions of a head that its tables cover; others are copied.

    Attributes:
        pairs: the two dimensions of pair i: "halves" are i and i + R / 2, "neighbours" are 2i and 2i + 1.
        placed: where the rotated pair is put, as in `pairs`.
        table: "own": each dimension has its own cosine and sine, and the tables have R columns. "first": a pair has
            one, of the first R / 2 of R columns. "pair": a pair has one, and the tables have R / 2 columns.
        trailing: the last R dimensions are rotated, not the first.
        wide: products and sums are float32 whatever the dtypes are, and the result alone is rounded.
        contracted: one product of each sum is not rounded at all, as where a compiler multiplies complex numbers: the
            number with the cosine or with the sine, for the first and the second of a pair; "" where both are.
    """

    pairs: Pairs = "halves"
    placed: Pairs = "halves"
    table: Literal["own", "first", "pair"] = "own"
    trailing: bool = False
    wide: bool = False
    contracted: Contraction = ""


@triton.jit
def rotate_pair(x, y, cos_x, sin_x, cos_y, sin_y, PRODUCT: tl.constexpr, CONTRACTED: tl.constexpr):
    """Rotate pairs: all float32, as loaded. PRODUCT: the dtype of products and sums. CONTRACTED: the place in
    `CONTRACTIONS`. Returns (x, y), float32, for the caller to round."""
    if CONTRACTED > 0:
        first = tl.fma(x, cos_x, -(y * sin_x)) if CONTRACTED % 2 == 1 else tl.fma(-y, sin_x, x * cos_x)
        exact_cos: tl.constexpr = CONTRACTED == 1 or CONTRACTED == 4
        second = tl.fma(y, cos_y, x * sin_y) if exact_cos else tl.fma(x, sin_y, y * cos_y)
        return first, second
    first = rounded(x * cos_x, PRODUCT) - rounded(y * sin_x, PRODUCT)
    second = rounded(y * cos_y, PRODUCT) + rounded(x * sin_y, PRODUCT)
    return rounded(first, PRODUCT), rounded(second, PRODUCT)


@triton.jit
def _rotate_heads(
    x, out, cos, sin, token, head, here,
    x_token, x_head, x_dim, out_token, out_head, out_dim, cos_token, cos_dim, sin_token, sin_dim,
    HALF: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr, PASSED: tl.constexpr,
    FROM: tl.constexpr, NEIGHBOURS: tl.constexpr, PLACED_NEIGHBOURS: tl.constexpr, OWN: tl.constexpr,
    WIDE: tl.constexpr, CONTRACTED: tl.constexpr,
):  # fmt: skip
    """Tokens x heads of one tensor: token [N, 1, 1], head [1, M, 1], here [N, M, 1]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    # what torch promotes to
    PRODUCT: tl.constexpr = tl.float32 if WIDE or cos.dtype.element_ty != DTYPE else DTYPE
    pair = tl.arange(0, PADDED)[None, None, :]
    inside = here & (pair < HALF)
    first = FROM + (2 * pair if NEIGHBOURS else pair)
    second = FROM + (2 * pair + 1 if NEIGHBOURS else pair + HALF)
    place = x + token * x_token + head * x_head
    a = tl.load(place + first * x_dim, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + second * x_dim, mask=inside, other=0.0).to(tl.float32)
    # the tables' columns of both dimensions of a pair
    own = first - FROM if OWN else pair
    other = second - FROM if OWN else pair
    real = (token >= 0) & (pair < HALF)
    cos_a = tl.load(cos + token * cos_token + own * cos_dim, mask=real, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + token * sin_token + own * sin_dim, mask=real, other=0.0).to(tl.float32)
    if OWN:
        cos_b = tl.load(cos + token * cos_token + other * cos_dim, mask=real, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + token * sin_token + other * sin_dim, mask=real, other=0.0).to(tl.float32)
    else:
        cos_b = cos_a
        sin_b = sin_a
    a, b = rotate_pair(a, b, cos_a, sin_a, cos_b, sin_b, PRODUCT, CONTRACTED)
    place_out = out + token * out_token + head * out_head
    first = FROM + (2 * pair if PLACED_NEIGHBOURS else pair)
    second = FROM + (2 * pair + 1 if PLACED_NEIGHBOURS else pair + HALF)
    tl.store(place_out + first * out_dim, rounded(a, DTYPE).to(DTYPE), mask=inside)
    tl.store(place_out + second * out_dim, rounded(b, DTYPE).to(DTYPE), mask=inside)
    if REST > 0:
        passed = tl.arange(0, PASSED)[None, None, :]
        dim = passed if FROM > 0 else passed + 2 * HALF
        inside = here & (passed < REST)
        tl.store(place_out + dim * out_dim, tl.load(place + dim * x_dim, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(
    q, k, q_out, k_out, cos, sin, num_tokens,
    q_token, q_head, q_dim, q_out_token, q_out_head, q_out_dim,
    k_token, k_head, k_dim, k_out_token, k_out_head, k_out_dim, cos_token, cos_dim, sin_token, sin_dim,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr, PASSED: tl.constexpr,
    FROM: tl.constexpr, NEIGHBOURS: tl.constexpr, PLACED_NEIGHBOURS: tl.constexpr, OWN: tl.constexpr,
    WIDE: tl.constexpr, CONTRACTED: tl.constexpr,
):  # fmt: skip
    """A program rotates PER heads of TOKENS tokens, of queries or else of keys."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    # tokens past the last are read as the last, and not written
    here = token < num_tokens
    token = tl.minimum(token, num_tokens - 1)
    group = tl.program_id(1)
    groups: tl.constexpr = (HEADS + PER - 1) // PER
    if group < groups:
        head = (group * PER + tl.arange(0, PER))[None, :, None]
        _rotate_heads(
            q, q_out, cos, sin, token, head, here & (head < HEADS),
            q_token, q_head, q_dim, q_out_token, q_out_head, q_out_dim, cos_token, cos_dim, sin_token, sin_dim,
            HALF, PADDED, REST, PASSED, FROM, NEIGHBOURS, PLACED_NEIGHBOURS, OWN, WIDE, CONTRACTED,
        )  # fmt: skip
    else:
        head = ((group - groups) * PER + tl.arange(0, PER))[None, :, None]
        _rotate_heads(
            k, k_out, cos, sin, token, head, here & (head < KEY_HEADS),
            k_token, k_head, k_dim, k_out_token, k_out_head, k_out_dim, cos_token, cos_dim, sin_token, sin_dim,
            HALF, PADDED, REST, PASSED, FROM, NEIGHBOURS, PLACED_NEIGHBOURS, OWN, WIDE, CONTRACTED,
        )  # fmt: skip


def rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: Style,
    *,
    heads_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys by their tokens' cosines and sines. One launch; no gradient.

    On the current stream, without synchronising; may be captured in a CUDA graph. T compiles nothing anew.

    Args:
        q: [T, H, D], or with `heads_first` [H, T, D]; dimensions of size 1 may stand before. bfloat16, float16 or
            float32; any strides. Read.
        k: likewise with KH heads, of q's dtype and D; or None.
        cos, sin: [T, columns], float32 or of q's dtype, any strides; dimensions of size 1 may stand before. Read.
        style: how.
        heads_first: see q.

    Returns:
        New tensors of q's and of k's shape and dtype, in the order of their dimensions in memory; None for no k.

    Raises:
        BadInput: shapes or dtypes that the kernel does not take.
    """
    _check(q, k, cos, sin, style, heads_first)
    return rotate_unchecked(q, k, cos, sin, style, heads_first)


@operation
def rotate_unchecked(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, style: Style, heads_first: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`rotate` for callers that know their tensors: nothing is checked."""
    tokens_at, heads_at = (-2, -3) if heads_first else (-3, -2)
    q_out = torch.empty_like(q)
    k_out = None if k is None else torch.empty_like(k)
    num_tokens, heads, dim = q.shape[tokens_at], q.shape[heads_at], q.shape[-1]
    if not num_tokens:
        return q_out, k_out
    half = cos.shape[-1] if style.table == "pair" else cos.shape[-1] // 2
    padded = triton.next_power_of_2(half)
    rest = dim - 2 * half
    keys, keys_out = (q, q_out) if k is None or k_out is None else (k, k_out)
    key_heads = 0 if k is None else k.shape[heads_at]
    per = min(triton.next_power_of_2(max(heads, key_heads)), max(1, _ELEMENTS // triton.next_power_of_2(dim)))
    # in the interpreter the number of programs is the cost
    tokens = 1 if isinstance(_rotate_kernel, triton.runtime.JITFunction) else _INTERPRETED_TOKENS
    grid: Any = (-(-num_tokens // tokens), -(-heads // per) + -(-key_heads // per))
    strides, strides_out, strides_k, strides_k_out = q.stride(), q_out.stride(), keys.stride(), keys_out.stride()
    _rotate_kernel[grid](
        q, keys, q_out, keys_out, cos, sin, num_tokens,
        strides[tokens_at], strides[heads_at], strides[-1],
        strides_out[tokens_at], strides_out[heads_at], strides_out[-1],
        strides_k[tokens_at], strides_k[heads_at], strides_k[-1],
        strides_k_out[tokens_at], strides_k_out[heads_at], strides_k_out[-1],
        cos.stride(-2), cos.stride(-1), sin.stride(-2), sin.stride(-1),
        HEADS=heads, KEY_HEADS=key_heads, TOKENS=tokens, PER=per, HALF=half, PADDED=padded, REST=rest,
        PASSED=triton.next_power_of_2(max(rest, 1)), FROM=rest if style.trailing else 0,
        NEIGHBOURS=style.pairs == "neighbours", PLACED_NEIGHBOURS=style.placed == "neighbours",
        OWN=style.table == "own", WIDE=style.wide, CONTRACTED=CONTRACTIONS.index(style.contracted),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def _check(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: Style,
    heads_first: bool,
) -> None:
    """Raise BadInput unless the kernel takes these tensors."""
    tokens_at, heads_at = (-2, -3) if heads_first else (-3, -2)
    if q.dtype not in FLOATS:
        raise BadInput("q", f"{q.dtype} is no dtype of queries")
    if q.dim() < 3 or any(size != 1 for size in q.shape[:-3]) or not q.shape[heads_at]:
        raise BadInput("q", f"shape {tuple(q.shape)} where [tokens, heads, dimensions] was expected")
    if k is not None:
        alike = k.dim() >= 3 and all(size == 1 for size in k.shape[:-3]) and k.shape[heads_at] > 0
        if (
            not alike
            or k.dtype is not q.dtype
            or (k.shape[tokens_at], k.shape[-1]) != (q.shape[tokens_at], q.shape[-1])
        ):
            raise BadInput("k", f"{k.dtype} {tuple(k.shape)}, beside queries {q.dtype} {tuple(q.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype is not q.dtype and table.dtype is not torch.float32:
            raise BadInput(name, f"{table.dtype}, beside queries of {q.dtype}")
        shaped = table.dim() >= 2 and all(size == 1 for size in table.shape[:-2])
        if not shaped or table.shape[-2] != q.shape[tokens_at] or table.dtype is not cos.dtype:
            raise BadInput(name, f"{table.dtype} {tuple(table.shape)}, beside queries {tuple(q.shape)}")
        if table.shape[-1] != cos.shape[-1]:
            raise BadInput(name, f"{table.shape[-1]} columns beside {cos.shape[-1]} of cos")
    columns = cos.shape[-1]
    rotated = 2 * columns if style.table == "pair" else columns
    if rotated % 2 or not 2 <= rotated <= q.shape[-1]:
        raise BadInput("cos", f"{columns} columns for heads of {q.shape[-1]}", limit=q.shape[-1])
