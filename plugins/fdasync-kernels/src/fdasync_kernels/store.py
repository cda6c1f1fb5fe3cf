"""Writes a step's new keys and values into the paged pool: one kernel for both.

Knows strided views and flat slots; knows no sequences. Called by the attention of a runner, once per layer,
before `attention/decode.py` or `attention/prefill.py` read what it wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.pages import head_offset, pages_of

if TYPE_CHECKING:
    import torch


@triton.jit(do_not_specialize=["slots"])
def _store(
    key, value, keys, values, slots,
    key_row, key_head, value_row, value_head,
    keys_block, keys_token, keys_head, values_block, values_token, values_head,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, PER_SHARE: tl.constexpr,
):  # fmt: skip
    # a program does WIDTH elements of one token, of its key and of its value
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head = element // KEY_DIM
    dim = element % KEY_DIM
    inside = element < HEADS * KEY_DIM
    read = tl.load(key + row * key_row + head.to(tl.int64) * key_head + dim, mask=inside)
    place = block * keys_block + offset * keys_token + head_offset(head, keys_head, KEY_DIM, PER_SHARE)
    tl.store(keys + place + dim, read, mask=inside)
    if VALUE_DIM > 0:
        head = element // VALUE_DIM
        dim = element % VALUE_DIM
        inside = element < HEADS * VALUE_DIM
        read = tl.load(value + row * value_row + head.to(tl.int64) * value_head + dim, mask=inside)
        place = block * values_block + offset * values_token + head_offset(head, values_head, VALUE_DIM, PER_SHARE)
        tl.store(values + place + dim, read, mask=inside)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Write each row's key and value to its slot; the rest of the pool stays as it is.

    `key` [T, KH, Dk] and `value` [T, KH, Dv] may have any strides but the last, which is 1; of a latent layer `value`
    and `values` are None. `keys` and `values` are views of the pool as `pages_of` takes them, of as many heads, and are
    written in place, rounded to the pool's dtype. `slots` int64 [T] is block * block_tokens + offset, -1 for rows
    that are not stored; no slot may occur twice. One launch on the current stream, no synchronisation; the tensors
    must live until it ran. Raises BadInput where the last dimension has a stride, and for
    views that are not of these heads.
    """
    if key.stride(2) != 1:
        raise BadInput("key", "the last dimension must be contiguous")
    value_dim = 0
    if value is None or values is None:
        value, values = key, keys
    else:
        if value.stride(2) != 1:
            raise BadInput("value", "the last dimension must be contiguous")
        value_dim = value.shape[2]
    rows, heads, key_dim = key.shape
    to, and_to = pages_of(keys), pages_of(values)
    if to.heads != heads or and_to.heads != heads or to.per_share != and_to.per_share:
        raise BadInput("key", f"of {heads} heads does not fit {tuple(keys.shape)} and {tuple(values.shape)}")
    if not rows:
        return
    # wide enough that a token's row is one or two programs, narrow enough that a thread moves 16 bytes
    elements = heads * max(key_dim, value_dim)
    width = min(1024, triton.next_power_of_2(elements))
    _store[(rows, triton.cdiv(elements, width))](
        key, value, keys, values, slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        to.block, to.token, to.head, and_to.block, and_to.token, and_to.head,
        BLOCK_TOKENS=to.block_tokens, HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, WIDTH=width,
        PER_SHARE=to.per_share, num_warps=max(1, min(4, width // 256)),
    )  # fmt: skip
