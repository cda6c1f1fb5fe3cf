"""The steps from the product of queries, keys and values to attention: norms of heads, rotary embedding, writing KV.

One kernel reads the merged product of a layer, writes the queries to a buffer, and keys and values straight to their
places in the paged pool. It rounds to the tensors' dtype wherever the library's separate operations do, and adds up a
head's squares in one order at every number of tokens: a token's bits depend on that token alone. Knows strided views
and flat slots; knows no models and no sequences. Called by the fused attention of a plugin, once per layer. Runs on
CUDA, or on the CPU in Triton's interpreter (tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.layer.norm import warps_of
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.pages import head_offset, pages_of
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

# heads of one program where norms are by head or none
_GROUP = 8
# elements of a program's heads
_LEAST = 256
_NORMS = {"": 0, "head": 1, "row": 2}


@dataclass(frozen=True)
class QkvForm:
    """What a layer does between its product and its attention.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        head_dim: D, of all of them.
        rotary_dim: leading dims of a head that are turned, even, 2 to D; the others pass.
        interleaved: dims 2i and 2i + 1 turn together; else dims i and i + rotary_dim / 2.
        full_precision: the rotary embedding is computed in float32 and rounded once; else each of its operations is.
        norm: RMSNorm of queries and keys before that, of each "head", of the whole "row" over all heads, or "": none.
        eps: of the norm.
        norm_rounds_once: the norm rounds after its weight; else before and after it.
        clip: queries and keys behind their norms, and values, are held within [-clip, clip]; 0: they are not.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    full_precision: bool = False
    norm: Literal["", "head", "row"] = ""
    eps: float = 0.0
    norm_rounds_once: bool = False
    clip: float = 0.0

    @property
    def width(self) -> int:
        """Columns of the merged product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@triton.jit
def _scaled(value, scale, weight, dtype: tl.constexpr, ONCE: tl.constexpr):
    value = value * scale
    if not ONCE:
        value = rounded(value, dtype)
    return rounded(weight * value, dtype)


@triton.jit
def _clipped(value, dtype: tl.constexpr, CLIP: tl.constexpr):
    if CLIP == 0.0:
        return value
    # NaN stays, as in torch's clamp
    return rounded(tl.where(value > CLIP, CLIP, tl.where(value < -CLIP, -CLIP, value)), dtype)


@triton.jit
def _turn(
    source, target, target_head, weight, cos, sin, cos_column, sin_column, first, wanted,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr,
    ONCE: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr, PER_SHARE: tl.constexpr,
):  # fmt: skip
    """Norm and turn GROUP heads of a token, from `first` on; store them where they are wanted."""
    dtype: tl.constexpr = source.dtype.element_ty
    head = first + tl.arange(0, GROUP)[:, None]
    here = head < HEADS
    pair = tl.arange(0, HALF_WIDTH)[None, :]
    inside = here & (pair < HALF)
    rest = 2 * HALF + tl.arange(0, REST_WIDTH if REST_WIDTH else 1)[None, :]
    passing = here & (rest < DIM)
    both = tl.arange(0, 2 * HALF_WIDTH)[None, :]
    # everything is read first: what is behind the sums would wait for them
    if INTERLEAVED:
        # neighbours are read together, and parted in registers
        read = tl.load(source + head * DIM + both, mask=here & (both < 2 * HALF), other=0.0).to(tl.float32)
        one, other = tl.split(tl.reshape(read, (GROUP, HALF_WIDTH, 2)))
    else:
        one = tl.load(source + head * DIM + pair, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + head * DIM + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    if REST_WIDTH:
        passed = tl.load(source + head * DIM + rest, mask=passing, other=0.0).to(tl.float32)
    if NORM == 1:
        dims = tl.arange(0, WIDTH)[None, :]
        whole = tl.load(source + head * DIM + dims, mask=here & (dims < DIM), other=0.0).to(tl.float32)
    c = tl.load(cos + pair * cos_column, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + pair * sin_column, mask=pair < HALF, other=0.0).to(tl.float32)
    if NORM:
        # a weight for each dim of a head, or of the row
        at = head * DIM if NORM == 2 else head * 0
        dim = 2 * pair if INTERLEAVED else pair
        step: tl.constexpr = 1 if INTERLEAVED else HALF
        one_weight = tl.load(weight + at + dim, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(weight + at + dim + step, mask=inside, other=0.0).to(tl.float32)
        if NORM == 1:
            # in the order in which `norm.py` sums a head
            squares = tl.sum(whole * whole, 1, keep_dims=True)
        else:
            squares = tl.sum(one * one, 1, keep_dims=True) + tl.sum(other * other, 1, keep_dims=True)
            if REST_WIDTH:
                squares += tl.sum(passed * passed, 1, keep_dims=True)
            squares = tl.sum(squares, 0, keep_dims=True)
        if REST_WIDTH:
            passed_weight = tl.load(weight + at + rest, mask=passing, other=0.0).to(tl.float32)
        size: tl.constexpr = DIM * HEADS if NORM == 2 else DIM
        scale = tl.rsqrt(tl.div_rn(squares, size + 0.0) + EPS)
        one = _scaled(one, scale, one_weight, dtype, ONCE)
        other = _scaled(other, scale, other_weight, dtype, ONCE)
        if REST_WIDTH:
            passed = _scaled(passed, scale, passed_weight, dtype, ONCE)
    one, other = _clipped(one, dtype, CLIP), _clipped(other, dtype, CLIP)
    if FULL:
        ahead = one * c + -other * s
        back = other * c + one * s
    else:
        ahead = rounded(one * c, dtype) + rounded(-other * s, dtype)
        back = rounded(other * c, dtype) + rounded(one * s, dtype)
    ahead = rounded(ahead, dtype).to(target.dtype.element_ty)
    back = rounded(back, dtype).to(target.dtype.element_ty)
    target += head_offset(head, target_head, DIM, PER_SHARE)
    if INTERLEAVED:
        joined = tl.reshape(tl.join(ahead, back), (GROUP, 2 * HALF_WIDTH))
        tl.store(target + both, joined, mask=here & (both < 2 * HALF) & wanted)
    else:
        tl.store(target + pair, ahead, mask=inside & wanted)
        tl.store(target + HALF + pair, back, mask=inside & wanted)
    if REST_WIDTH:
        passed = _clipped(passed, dtype, CLIP)
        tl.store(target + rest, passed.to(target.dtype.element_ty), mask=passing & wanted)


# a model's strides never change, but the columns of some libraries' angles are T apart, and slots may lie anywhere
@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["cos_column", "sin_column"])
def _prepare(
    qkv, query, keys, values, slots, cos, sin, query_weight, key_weight,
    qkv_row, cos_row, sin_row, cos_column, sin_column,
    keys_block, keys_token, keys_head, values_block, values_token, values_head,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, GROUP: tl.constexpr, KV_GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr, ONCE: tl.constexpr, EPS: tl.constexpr,
    CLIP: tl.constexpr, PER_SHARE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    # a program does a few heads of one token: queries, or keys and values
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    source = qkv + row * qkv_row
    cos += row * cos_row
    sin += row * sin_row
    if part < query_parts:
        every = tl.arange(0, 1)[None, :] == 0
        _turn(
            source, query + row * HEADS * DIM, DIM, query_weight, cos, sin, cos_column, sin_column, part * GROUP, every,
            HEADS, DIM, WIDTH, HALF, HALF_WIDTH, REST_WIDTH, GROUP, INTERLEAVED, FULL, NORM, ONCE, EPS, CLIP, 1,
        )  # fmt: skip
    else:
        # a mask, and no branch: reading need not wait for the slot
        slot = tl.load(slots + row + tl.arange(0, 1)[None, :])
        stored = slot >= 0
        block = slot // BLOCK_TOKENS
        offset = slot % BLOCK_TOKENS
        first = (part - query_parts) * KV_GROUP
        head = first + tl.arange(0, KV_GROUP)[:, None]
        dim = tl.arange(0, WIDTH)[None, :]
        inside = (head < KV_HEADS) & (dim < DIM)
        value = tl.load(source + (HEADS + KV_HEADS + head) * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        _turn(
            source + HEADS * DIM, keys + block * keys_block + offset * keys_token, keys_head, key_weight, cos, sin,
            cos_column, sin_column, first, stored,
            KV_HEADS, DIM, WIDTH, HALF, HALF_WIDTH, REST_WIDTH, KV_GROUP, INTERLEAVED, FULL, NORM, ONCE, EPS, CLIP,
            PER_SHARE,
        )  # fmt: skip
        value = _clipped(value, qkv.dtype.element_ty, CLIP)
        place = block * values_block + offset * values_token + head_offset(head, values_head, DIM, PER_SHARE) + dim
        tl.store(values + place, value.to(values.dtype.element_ty), mask=inside & stored)


@operation
def prepare_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    form: QkvForm,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write each row's key and value to its slot; return the queries [T, heads, D], a new tensor.

    Args:
        qkv: [T, (heads + 2 kv_heads) * D] float32, bfloat16 or float16: queries, then keys, then values, head after
            head. Rows may be strided. Read.
        cos, sin: [T, at least rotary_dim / 2], any strides; the first rotary_dim / 2 columns are the pairs'.
        keys, values: views of the pool as `pages_of` takes them, of kv_heads of D, written in place. The rest of the
            pool stays as it is.
        slots: int64 [T], block * block_tokens + offset; -1: not stored. No slot may occur twice.
        form: see `QkvForm`.
        query_weight, key_weight: of the norms: [D] each, or [heads * D] and [kv_heads * D] of a "row".

    One launch on the current stream, without synchronising; a CUDA graph can hold it, and T compiles nothing anew. The
    tensors must live until it ran. Raises BadInput for shapes and strides that the kernel does not take.
    """
    rows = qkv.shape[0]
    half = form.rotary_dim // 2
    if qkv.dim() != 2 or qkv.shape[1] != form.width or qkv.stride(1) != 1:
        raise BadInput("qkv", f"{tuple(qkv.shape)} is no contiguous product", limit=form.width)
    if qkv.dtype not in FLOATS:
        raise BadInput("qkv", f"{qkv.dtype} is no dtype of rows")
    if slots.shape != (rows,) or slots.dtype is not torch.int64 or not slots.is_contiguous():
        raise BadInput("slots", f"{slots.dtype} {tuple(slots.shape)} where int64 [{rows}] was expected")
    if not 2 <= form.rotary_dim <= form.head_dim or form.rotary_dim % 2:
        raise BadInput("rotary_dim", f"{form.rotary_dim} is no even part of a head", limit=form.head_dim)
    if cos.shape != sin.shape or cos.shape[0] != rows or cos.shape[1] < half:
        raise BadInput("cos", f"shape {tuple(cos.shape)} where [{rows}, at least {half}] was expected")
    to, and_to = pages_of(keys), pages_of(values)
    if (to.heads, to.dim) != (form.kv_heads, form.head_dim) or values.shape != keys.shape:
        raise BadInput("keys", f"pool views {tuple(keys.shape)} and {tuple(values.shape)} are not of this form")
    if query_weight is None or key_weight is None:
        if form.norm:
            raise BadInput("query_weight", "a norm needs the weights of queries and keys")
        query_weight = key_weight = qkv
    query = torch.empty((rows, form.heads, form.head_dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return query
    rest = form.head_dim - form.rotary_dim
    # a norm over all heads is one program's; others take a few heads, so that a single token occupies the device
    most = 1 << 30 if form.norm == "row" else _GROUP
    width = triton.next_power_of_2(form.head_dim)
    group = max(min(most, triton.next_power_of_2(form.heads)), _LEAST // width)
    kv_group = min(most, triton.next_power_of_2(form.kv_heads))
    if form.norm == "head":
        # the number of a program's heads decides how much of a head a thread takes, and so the order of its sum
        kv_group = group
    grid: Any = (rows, triton.cdiv(form.heads, group) + triton.cdiv(form.kv_heads, kv_group))
    _prepare[grid](
        qkv, query, keys, values, slots, cos, sin, query_weight, key_weight,
        # the stride of a single row may be anything in torch, and another kind of number compiles another kernel
        qkv.stride(0) if rows > 1 else form.width, cos.stride(0), sin.stride(0), cos.stride(1), sin.stride(1),
        to.block, to.token, to.head, and_to.block, and_to.token, and_to.head,
        BLOCK_TOKENS=to.block_tokens, HEADS=form.heads, KV_HEADS=form.kv_heads, DIM=form.head_dim, WIDTH=width,
        HALF=half, HALF_WIDTH=triton.next_power_of_2(half), REST_WIDTH=triton.next_power_of_2(rest) if rest else 0,
        GROUP=group, KV_GROUP=kv_group, INTERLEAVED=form.interleaved, FULL=form.full_precision,
        NORM=_NORMS[form.norm], ONCE=form.norm_rounds_once, EPS=form.eps, CLIP=form.clip,
        PER_SHARE=to.per_share,
        # the library's products and sums are operations of their own, so none may be joined
        num_warps=warps_of(group * width, qkv.element_size(), 8), enable_fp_fusion=False,
        **overlap(qkv.device),
    )  # fmt: skip
    return query
